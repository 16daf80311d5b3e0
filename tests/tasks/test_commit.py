"""Committing an iteration: once, also after a crash between its writes; and which policy is the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.runs.records import RecordExists
from tasks.commit_iteration import commit_iteration, draft_record, records_before
from tasks.runs.iteration_record import Attempt, IterationRecord, best_of
from tasks.stages.context import RunContext
from tasks.stages.references import CheckpointRef, DatasetRef, RolloutsRef
from tasks.stages.table import GENERATE_ROLLOUTS, START_POLICY, UPDATE_POLICY
from tests.flows.samples import record
from tests.tasks.run_contexts import run_context, smoke_spec

PLACE = {"uri": "file:///store/x/aa"}


def checkpoint(digest: str = "0" * 64) -> CheckpointRef:
    """A reference; nothing of it is read here."""
    return CheckpointRef(kind="checkpoint", digest=digest, **PLACE)


def commit(
    context: RunContext, previous: IterationRecord | None, made: CheckpointRef, metrics: dict[str, float] | None = None
) -> IterationRecord:
    """One commit without evaluation; `metrics` of the rollouts."""
    dataset = DatasetRef(kind="dataset", digest="d" * 64, counts={"train": 50}, **PLACE)
    stage = START_POLICY if previous is None else UPDATE_POLICY
    rollouts = RolloutsRef(
        kind="rollouts", digest="e" * 64, metrics=metrics or {}, num_responses=32, num_response_tokens=64, **PLACE
    )
    sampled = {} if previous is None else {GENERATE_ROLLOUTS.name: rollouts}
    draft = draft_record(context, {**sampled, stage.name: made}, dataset, previous, Attempt())
    committed: IterationRecord = commit_iteration.fn(context, draft)
    return committed


def test_the_data_cursor_moves_by_an_iterations_prompts_over_epochs(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    start = commit(context, None, checkpoint())
    first = commit(context, start, checkpoint("1" * 64))
    second = commit(context, first, checkpoint("2" * 64))
    assert [(r.position, r.epoch, r.index) for r in (start, first, second)] == [(0, 0, 0), (32, 0, 32), (64, 1, 14)]
    assert second.reference == start.checkpoint
    third = commit(context, second, checkpoint("3" * 64), {"rollout/batches": 2.0})
    assert (third.position, third.epoch, third.index) == (128, 2, 28)


def test_an_iteration_measures_tokens_per_second_of_sampling_and_of_all_of_it(tmp_path: Path) -> None:
    """64 response tokens; seconds are the record's own, which begin where the iteration before is committed."""
    context = run_context(smoke_spec(), tmp_path)
    start = commit(context, None, checkpoint())
    assert [name for name in start.metrics if name.startswith("throughput/")] == []
    context.timings.add(GENERATE_ROLLOUTS.name, wall=0.5)
    first = commit(context, start, checkpoint("1" * 64))
    assert first.metrics["throughput/rollout_tokens_per_second"] == 128.0
    assert first.metrics["throughput/tokens_per_second"] == 64 / first.metrics["seconds/iteration"]
    context.timings.add(GENERATE_ROLLOUTS.name, wall=0.001, cached=True)
    kept = commit(context, first, checkpoint("2" * 64))  # sampled before, and taken from the store
    assert [name for name in kept.metrics if name.startswith("throughput/")] == []


def test_a_crash_between_spec_and_first_record_does_not_spoil_the_run_name(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    context.records.create_spec(context.spec.document())  # and then the process died
    assert commit(context, None, checkpoint()).iteration == 0


def test_a_repeated_commit_takes_the_record_that_is_there(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    first = commit(context, None, checkpoint())
    assert commit(context, None, checkpoint()) == first


def test_a_record_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    context = run_context(smoke_spec(), tmp_path)
    commit(context, None, checkpoint())
    with pytest.raises(RecordExists):
        commit(context, None, checkpoint("f" * 64))


def test_the_best_is_the_highest_and_the_earliest_of_equals() -> None:
    before = [record(0, {"evaluation/score": 0.2}), record(2, {"evaluation/score": 0.7}), record(3, {"kl/coef": 9.0})]
    now = best_of("evaluation/score", {"evaluation/score": 0.7}, 4, checkpoint(), before)
    assert (now.iteration, now.value) == (2, 0.7)
    better = best_of("evaluation/score", {"evaluation/score": 0.8}, 4, checkpoint(), before)
    assert (better.iteration, better.value) == (4, 0.8)


def test_without_any_value_the_latest_policy_counts() -> None:
    now = best_of("evaluation/score", {}, 4, checkpoint(), [record(3, {"kl/coef": 9.0})])
    assert (now.iteration, now.value) == (4, None)


def test_a_changed_metric_is_compared_over_all_records(tmp_path: Path) -> None:
    context = run_context(smoke_spec("registry.metric=score/mean"), tmp_path)
    for number, score in enumerate([0.5, 0.9, 0.1]):
        context.records.commit(number, record(number, {"score/mean": score}).model_dump(mode="json"))
    previous = record(2, {"score/mean": 0.1})  # its best is by evaluation/score
    found = best_of("score/mean", {"score/mean": 0.3}, 3, checkpoint(), records_before(context, previous, context.spec))
    assert (found.iteration, found.value) == (1, 0.9)
