"""What tests of the whole way, from preferences to a promoted policy, begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import toy_engines


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ppoflow keeps its state, with an MLflow of its own beside it."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path / "home"


@pytest.fixture
def toys(home: Path, monkeypatch: pytest.MonkeyPatch) -> ToyEngines:
    """Engines that only pretend, for all commands."""
    return toy_engines(monkeypatch)
