"""One writer: whoever was silent for too long, and goes on, finds that it can change nothing any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.ppo import finish_interrupted
from infra.engines.protocol import EngineClosed
from infra.runs.lease import LeaseLost
from tasks.stages.context import RunContext, working
from tests.tasks.toy_runs import ToyRun, digests

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("dataset.evaluation=null", "registry.metric=score/mean", "iterations=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run that one process has done."""
    run = ToyRun(tmp_path_factory.mktemp("whole"), SHORT)
    run.train()
    return run


@pytest.mark.parametrize("job", ["score_rollouts", "update_policy"])
def test_a_process_that_comes_back_after_another_took_over_commits_nothing(
    job: str, whole: ToyRun, tmp_path: Path
) -> None:
    first, second = ToyRun(tmp_path, SHORT), ToyRun(tmp_path, SHORT)
    first.engines.before(job, 2, lambda: second.context() and None)
    with pytest.raises(LeaseLost, match=r"its lease 1 was taken over; process \d+ on here .* has it now"):
        first.train()
    assert [record.iteration for record in second.records()] == [0, 1]
    assert digests(second.train()) == digests(whole.records())
    assert {record.lease for record in second.records()} == {1, 3}


def test_what_the_other_has_done_meanwhile_stays(whole: ToyRun, tmp_path: Path) -> None:
    first, second = ToyRun(tmp_path, SHORT), ToyRun(tmp_path, SHORT)
    done: dict[str, bytes] = {}

    def takes_over_and_ends_the_run() -> None:
        second.train()
        done.update(second.record_bytes())

    first.engines.before("update_policy", 2, takes_over_and_ends_the_run)
    with pytest.raises(LeaseLost, match="this process no longer has the run, its lease 1"):
        first.train()
    assert first.record_bytes() == done
    assert digests(second.records()) == digests(whole.records())


@pytest.mark.parametrize(
    "change",
    [
        lambda context: context.supersede(0),
        lambda context: context.records.note("rollbacks", {"after": 0}),
        lambda context: context.records.commit(4, {}),
        lambda context: context.records.create_spec({}),
        lambda context: context.pin("scores", "aa"),
    ],
    ids=["supersede", "note", "commit", "spec", "pin"],
)
def test_no_change_of_a_run_gets_through(change: Callable[[RunContext], object], whole: ToyRun, tmp_path: Path) -> None:
    run = whole.copy(tmp_path / "copy")
    first, before = run.context(), run.record_bytes()
    run.context()
    with pytest.raises(LeaseLost):
        change(first)
    assert (run.record_bytes(), run.notes("rollbacks")) == (before, [])


def test_engines_closed_over_it_are_not_what_people_are_told_of(whole: ToyRun, tmp_path: Path) -> None:
    run = whole.copy(tmp_path / "copy")
    context = run.context()

    def works_on() -> None:
        with working(context):
            run.context()
            raise EngineClosed("the heartbeat closed the engines")

    with pytest.raises(LeaseLost):
        works_on()


def test_the_next_process_knows_who_died_and_who_ended_well(whole: ToyRun, tmp_path: Path) -> None:
    run = whole.copy(tmp_path / "copy")
    died, ended = run.context(), run.context()
    assert died.lease is not None
    assert ended.lease is not None
    [known] = ended.lease.predecessors
    ended.lease.release()
    last = run.context()
    assert last.lease is not None
    assert last.lease.predecessors == ()
    assert known.identity.host == "here"
    finish_interrupted(last, run.console())
    assert run.said == ""
