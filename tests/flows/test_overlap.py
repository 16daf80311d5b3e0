"""Overlapped sampling: the next responses are sampled while the policy learns, and neither a death nor a rollback, a
failure to sample ahead, retention or a fork changes a byte."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from flows.iteration import Rerun
from infra.artifacts.local_store import LocalStore
from tasks.runs.fork import fork_run
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.retention import find_garbage
from tasks.runs.run_state import spec_of_run
from tasks.stages.references import StageRef
from tests.flows.test_rollback import GUARDED, diverges_in_the_fourth
from tests.flows.test_verify import verify
from tests.tasks.toy_engines import HELD_OUT, ToyEngines
from tests.tasks.toy_runs import ToyRun, digests, killed, lose_it
from tests.tasks.toy_updates import refusal
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("prefect_server")
OVERLAPPED = ("schedule=overlapped", "update.importance_correction=token")
SETTINGS = (*OVERLAPPED, "iterations=5", "evaluation.every=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run that nothing has disturbed."""
    run = ToyRun(tmp_path_factory.mktemp("overlapped") / "home", SETTINGS)
    run.train()
    return run


def samplers(run: ToyRun) -> list[int]:
    """For each iteration from the first on, the iteration whose policy gave its responses, by the manifests."""
    made_by = {record.checkpoint.digest: record.iteration for record in run.records()}
    store, found = LocalStore(run.home / "store"), []
    for record in run.records()[1:]:
        inputs = store.manifest(rollouts_of(record).bare()).inputs
        found += [made_by[given.digest] for given in inputs if given.kind == "checkpoint"]
    return found


def rollouts_of(record: IterationRecord) -> StageRef:
    """What the iteration was trained on."""
    rollouts = record.made("rollouts")
    assert rollouts is not None
    return rollouts


def test_each_policy_learns_from_the_answers_of_the_one_before(whole: ToyRun) -> None:
    assert samplers(whole) == [0, 0, 1, 2, 3]
    assert [record.metrics.get("rollout/staleness") for record in whole.records()] == [None, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert whole.engines.count("generate_rollouts") == 5


def test_the_next_responses_are_sampled_before_the_update_has_ended(tmp_path: Path) -> None:
    run, seen = ToyRun(tmp_path, SETTINGS), list[int]()

    def wait_for_the_next(number: int) -> None:
        until(lambda: run.engines.count("generate_rollouts") > number)
        seen.append(number)

    for number in (1, 2, 3, 4):
        run.engines.before("update_policy", number, partial(wait_for_the_next, number))
    run.train()
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("job", "number"),
    [("score_rollouts", 2), ("update_policy", 2), (HELD_OUT, 3)],
)
def test_killed_before_any_job_it_goes_on_to_the_same_bytes(
    job: str, number: int, whole: ToyRun, tmp_path: Path
) -> None:
    run = ToyRun(tmp_path, SETTINGS)
    run.engines.before(job, number, killed)
    run.train_until_killed()
    before = run.record_bytes()
    assert digests(run.train()) == digests(whole.records())
    assert {name: run.record_bytes()[name] for name in before} == before


def test_what_could_not_be_sampled_ahead_is_sampled_then(whole: ToyRun, tmp_path: Path) -> None:
    def refuse() -> None:
        raise refusal("not now")

    run = ToyRun(tmp_path, SETTINGS)
    run.engines.before("generate_rollouts", 3, refuse)
    assert digests(run.train()) == digests(whole.records())


def test_what_was_sampled_ahead_and_is_gone_is_sampled_again(whole: ToyRun, tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SETTINGS)
    third, lost = run.place(rollouts_of(whole.records()[3])), list[Path]()

    def lose_the_third() -> None:
        until(lambda: (third / "manifest.json").is_file())
        lose_it(third)
        lost.append(third)

    run.engines.before("update_policy", 2, lose_the_third)
    assert digests(run.train()) == digests(whole.records())
    assert lost


def test_engines_of_another_time_come_after_what_is_sampled_ahead(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, (*OVERLAPPED, "evaluation.every=2"))
    start = run.place(run.train("iterations=3")[0].checkpoint)
    run.engines.before("score_rollouts", 1, partial(lose_it, start))
    run.engines.before("generate_rollouts", 2, lambda: until(lambda: "holds no artifact checkpoint/" in run.said))
    run.train("iterations=5", "training.num_ranks=2")
    assert "checkpoint of iteration 0 is undamaged again" in run.said
    assert run.engines.ranks == [1, 2, 1, 2]
    assert run.engines.count("generate_rollouts") == 5


def test_a_rollback_draws_other_samples_however_often_it_dies(tmp_path: Path) -> None:
    settings = (*GUARDED, *OVERLAPPED)
    whole = ToyRun(tmp_path / "whole", settings, engines=ToyEngines(diverges_in_the_fourth))
    whole.train()
    assert [(r.iteration, r.attempt) for r in whole.records()][-3:] == [(3, 1), (4, 1), (5, 1)]
    run = ToyRun(tmp_path / "killed", settings, engines=ToyEngines(diverges_in_the_fourth))
    run.engines.before("update_policy", 5, killed)
    run.train_until_killed()
    assert digests(run.train()) == digests(whole.records())


def test_every_iteration_is_verified_and_done_again(whole: ToyRun, tmp_path: Path) -> None:
    assert {found.same for found in verify(whole, tmp_path / "scratch", "0..5")} == {True}
    run = whole.copy(tmp_path / "copy")
    before = digests(run.records())
    run.train(rerun=Rerun(iteration=4, start="score"))
    assert digests(run.records()) == before


def test_retention_keeps_the_policy_that_answers_next(
    whole: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    run = ToyRun(tmp_path, (*SETTINGS, "checkpoint.keep_last=1"))
    run.engines.before("score_rollouts", 5, killed)
    run.train_until_killed()
    lose_it(run.place(rollouts_of(whole.records()[5])))
    assert digests(run.train()) == digests(whole.records())
    assert find_garbage().artifacts == []


def test_a_fork_with_another_schedule_begins_with_its_own_answers(
    whole: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    source = whole.copy(tmp_path / "home")
    fork_run(source.name, 3, "sync", ["schedule=synchronous"])
    fork = ToyRun(source.home, name="sync", engines=source.engines)
    fork.train(spec=spec_of_run("sync"))
    assert samplers(fork) == [0, 0, 1, 3, 4]
    fork_run("sync", 4, "ahead", ["schedule=overlapped"])
    again = ToyRun(source.home, name="ahead", engines=source.engines)
    again.train(spec=spec_of_run("ahead").with_overrides(["iterations=7"]))
    assert samplers(again) == [0, 0, 1, 3, 4, 4, 5]
