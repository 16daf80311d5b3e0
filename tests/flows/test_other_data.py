"""A run whose data is not what it was when it was last under way: people are told, once it is prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.engines.protocol import EngineJob
from tasks.runs.fork import fork_run
from tasks.runs.run_state import spec_to_go_on
from tests.tasks import toy_engines
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("dataset.evaluation=null", "registry.metric=score/mean", "iterations=2")


def rows(count: int) -> Callable[[ToyEngines, EngineJob], dict[str, Any]]:
    """So many prompts to train on, other ones than there were."""

    def prepare(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        made = toy_engines.prepare_dataset(engines, job)
        assert job.output is not None
        (job.output / "dataset.json").write_text(f"{count} other rows")
        return {**made, "counts": {"train": count, "eval": 0}}

    return prepare


def edited(run: ToyRun, count: int) -> ToyRun:
    """The run where its data files were edited, so that its dataset is prepared anew."""
    run.code = f"with {count} other rows"
    run.engines.jobs["prepare_dataset"] = rows(count)
    return run


@pytest.mark.parametrize(
    ("count", "differs", "cursor"),
    [
        (40, "50 rows to train on then, 40 rows to train on now", "epoch 1, prompt 24"),
        (50, "50 rows to train on, as then, in other bytes", "epoch 1, prompt 14"),
    ],
)
def test_other_data_than_the_last_record_had_is_told_once(
    tmp_path: Path, count: int, differs: str, cursor: str
) -> None:
    run = ToyRun(tmp_path, SHORT)
    run.train()
    assert "the dataset" not in run.said
    edited(run, count).train("iterations=3")
    told = f"! the dataset is not that of iteration 2 ({differs}): continuing with the new one at {cursor}; for the old"
    assert run.said.count(told) == 1
    assert run.said.count("the dataset is not that of") == 1
    record = run.records()[-1]
    assert (record.epoch, record.index) == divmod(3 * 32, count)
    run.train("iterations=4")
    assert run.said.count("the dataset is not that of") == 1


def test_data_that_came_out_the_same_is_not_told_of(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SHORT)
    run.train()
    run.code = "a later version"
    run.train("iterations=3")
    assert "the dataset" not in run.said


@pytest.mark.parametrize(("limit", "told"), [(16, True), (15, False)])  # the source's is 16
def test_a_fork_that_asks_for_other_data_is_not_told_of_it(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, told: bool
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    ToyRun(tmp_path, SHORT).train()
    fork_run("toy", 2, "new", [f"dataset.max_prompt_tokens={limit}", "iterations=3"])
    fork = edited(ToyRun(tmp_path, name="new"), 40)
    fork.train(spec=spec_to_go_on("new"))
    assert ("the dataset is not that of iteration 2" in fork.said) is told
