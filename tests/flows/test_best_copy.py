"""The best policy is copied to the run's folder beside the iteration that follows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import flows.ppo
from tests.tasks.toy_runs import ToyRun
from tests.waiting import LONG_S

pytestmark = pytest.mark.usefixtures("prefect_server")
OVERRIDES = ("iterations=2", "dataset.evaluation=null", "registry.metric=policy/quality")


def test_the_next_iteration_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sampling, done = ToyRun(tmp_path, OVERRIDES), threading.Event(), list[int]()
    run.engines.before("generate_rollouts", 1, sampling.set)
    leave_best = flows.ppo.leave_best

    def slow(context: Any, console: Any, record: Any) -> None:
        assert sampling.wait(LONG_S), "sampling begins after the copy"
        leave_best(context, console, record)
        done.append(record.iteration)

    monkeypatch.setattr(flows.ppo, "leave_best", slow)
    assert [record.best.iteration for record in run.train()] == [0, 1, 2]
    assert done == [0, 1, 2]  # one after the other, and all before the end
    assert (tmp_path / "runs/toy/best-policy/manifest.json").is_file()


def test_an_error_that_nobody_expected_of_it_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ToyRun(tmp_path, OVERRIDES)
    monkeypatch.setattr(flows.ppo, "leave_best", lambda *_: {}["unexpected"])
    with pytest.raises(KeyError, match="unexpected"):
        run.train()
    assert [record.iteration for record in run.records()] == [0, 1]
