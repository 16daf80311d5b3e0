"""Mistakes of a new user, each through the command line: one message, and nothing has begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experience.meeting import Answer, Mistake, meet, meet_here
from tests.experience.mistakes import IN_DATA, IN_MODELS, IN_REWARDS, IN_SPECS, ON_THE_MACHINE

STARTED = ("prefect", "mlflow", "training.log", "rollout.log", "store/")
LONGEST = 600
CHECKED = [*IN_DATA, *IN_REWARDS, *IN_MODELS]
ONE_OF_EACH = [IN_DATA[3], IN_REWARDS[-1], IN_MODELS[-1]]


def is_refused_at_once(mistake: Mistake, answer: Answer) -> None:
    """The message names value and remedy; no traceback; no server and no engine with a model has started."""
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
    is_refused_at_once(mistake, meet(mistake, project))


@pytest.mark.usefixtures("shared_engine")
@pytest.mark.parametrize("mistake", CHECKED, ids=called)
def test_in_data_rewards_and_models(mistake: Mistake, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_refused_at_once(mistake, meet_here(mistake, project, monkeypatch))
    assert not (project / "state").exists()


@pytest.mark.parametrize("mistake", ONE_OF_EACH, ids=called)
def test_of_each_kind_one_through_the_command(mistake: Mistake, project: Path) -> None:
    is_refused_at_once(mistake, meet(mistake, project))
