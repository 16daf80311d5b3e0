"""Rows that are written to while an engine reads them: what it makes of them is not stored under the old rows' key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ppo_core.records import InputError
from ppo_core.spec import RewardModelSpec
from tasks.preferences.context import RewardModelContext
from tasks.preferences.prepare_preferences import prepare_preferences
from tasks.prepare_dataset import prepare_dataset
from tasks.stages.context import RunContext
from tests.tasks import toy_reward_models
from tests.tasks.run_contexts import run_context, smoke_spec
from tests.tasks.toy_engines import ToyEngines

CHANGED = r"changed while it was read: give the command again"
Make = Callable[[RunContext], object]
JOBS = {"prepare_dataset": prepare_dataset.fn, "prepare_preferences": prepare_preferences.fn}


def rows(number: int) -> str:
    return "".join(json.dumps({"prompt": f"{row}+1=", "answer": str(row + 1)}) + "\n" for row in range(number))


@pytest.fixture
def engines() -> ToyEngines:
    found = ToyEngines()
    found.jobs["prepare_preferences"] = toy_reward_models.prepare_preferences
    return found


def opened(job: str, data: Path, home: Path, engines: ToyEngines) -> RunContext:
    """The means of a process that reads this file, or folder, of rows."""
    context = run_context(
        smoke_spec(f"dataset.train={data}", "dataset.evaluation=null", "registry.metric=score/mean"),
        home,
        engines=engines,
        taking_over=True,
    )
    context.fingerprints["scoring"] = "toy"
    if job == "prepare_dataset":
        return context
    document = {
        "model": {"path": str(home.parent / "model")},
        "dataset": {"train": str(data), "evaluation_fraction": 0.2},
    }
    means = {one.name: getattr(context, one.name) for one in fields(context) if one.init and one.name != "spec"}
    return RewardModelContext(spec=RewardModelSpec.model_validate(document), **means)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("place", ["rows.jsonl", "folder"])
def test_nothing_is_stored_and_the_command_given_again_reads_what_is_there(
    job: str, place: str, engines: ToyEngines, tmp_path: Path
) -> None:
    file = tmp_path / place if place != "folder" else tmp_path / place / "rows.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text(rows(2))
    (tmp_path / "model").mkdir()
    make: Make = JOBS[job]
    context = opened(job, tmp_path / place, tmp_path / "home", engines)
    engines.before(job, 1, lambda: file.write_text(rows(3)) and None)
    with pytest.raises(InputError, match=rf"{place} {CHANGED}"):
        make(context)
    assert not list((tmp_path / "home" / "store" / "dataset").glob("*/manifest.json"))
    with pytest.raises(InputError, match=CHANGED):
        make(context)  # a second try of the same process has the same key
    again = opened(job, tmp_path / place, tmp_path / "home", engines)
    made = make(again)
    assert make(replace(again)) == made
    assert engines.count(job) == 3
