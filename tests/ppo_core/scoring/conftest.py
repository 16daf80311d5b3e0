"""What tests of scoring share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tries, milliseconds; programs that a test starts keep their own."""
    monkeypatch.setattr("ppo_core.scoring.reward.FIRST_PAUSE_S", 0.001)
