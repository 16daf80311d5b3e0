"""Mistakes of a new user, each through the command line: one message, and nothing has begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experience.mistakes import IN_DATA, IN_MODELS, IN_REWARDS, IN_SPECS, ON_THE_MACHINE, Mistake, meet

STARTED = ("prefect", "mlflow", "training.log", "rollout.log")
LONGEST = 600


def is_refused_at_once(mistake: Mistake, project: Path) -> None:
    """The message names value and remedy; no traceback; no server and no engine with a model has started."""
    answer = meet(mistake, project)
    assert answer.status == 2, answer
    missing = [part for part in mistake.says if part not in answer.error]
    assert not missing, answer.error
    shown = answer.output + answer.error
    assert not [word for word in ("Traceback", "EngineJobError", "ValidationError") if word in shown], shown
    last = answer.error.strip().splitlines()
    assert len(last) <= 3, answer.error
    assert max(map(len, last)) <= LONGEST, answer.error
    assert not [file for file in answer.left if any(name in file for name in STARTED)]


def called(mistake: Mistake) -> str:
    """The name of a case."""
    return mistake.what.replace(" ", "-")


@pytest.mark.parametrize("mistake", [*IN_SPECS, *ON_THE_MACHINE], ids=called)
def test_in_the_spec_or_on_the_machine(mistake: Mistake, project: Path) -> None:
    is_refused_at_once(mistake, project)


@pytest.mark.parametrize("mistake", [*IN_DATA, *IN_REWARDS, *IN_MODELS], ids=called)
def test_in_data_rewards_and_models(mistake: Mistake, project: Path) -> None:
    is_refused_at_once(mistake, project)
