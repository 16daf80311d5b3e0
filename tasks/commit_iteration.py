"""Drafting an iteration's record from what its stages made, and writing it once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from infra.runs.records import RecordExists
from ppo_core.spec import RunSpec
from tasks.runs.fork import compared_with
from tasks.runs.guards import gold_trend
from tasks.runs.iteration_record import Attempt, IterationRecord, best_of, made_of_kind, read_record
from tasks.runs.record_chain import made_with, record_digest, spec_document
from tasks.runs.run_state import changed_values, record_at
from tasks.stages.context import RunContext
from tasks.stages.jobs import room_for
from tasks.stages.references import CheckpointRef, DatasetRef, ExperienceRef, RolloutsRef, StageRef
from tasks.stages.stage import completed, stage
from tasks.stages.table import GENERATE_ROLLOUTS


def draft_record(
    context: RunContext,
    made: Mapping[str, StageRef],
    dataset: DatasetRef,
    previous: IterationRecord | None,
    attempt: Attempt,
) -> IterationRecord:
    """The record, not yet written, of the iteration after `previous`, whose stages `made` these artifacts."""
    spec, checkpoint = context.spec, made_of_kind(made, "checkpoint")
    assert isinstance(checkpoint, CheckpointRef)
    experience, rollouts = made_of_kind(made, "experience"), made_of_kind(made, "rollouts")
    metrics = {name: value for ref in made.values() for name, value in ref.metrics.items()}
    metrics |= context.timings.measured()
    if isinstance(rollouts, RolloutsRef):
        metrics |= throughput(metrics, rollouts) if context.timings.worked(GENERATE_ROLLOUTS.name) else {}
        metrics |= staleness(spec, previous)
    metrics |= gold_trend(context, previous, metrics)
    iteration = 0 if previous is None else previous.iteration + 1
    started_with = spec_document(context.records) or spec.model_dump(mode="json")
    first_spec = RunSpec.model_validate(started_with)
    changed = changed_values(first_spec, spec)
    drawn = rollouts.batches * spec.rollout.prompts_per_iteration if isinstance(rollouts, RolloutsRef) else 0
    position = drawn if previous is None else previous.position + drawn
    epoch, index = divmod(position, dataset.counts["train"])
    record = IterationRecord(
        run=context.run,
        iteration=iteration,
        spec_digest=made_with(started_with, changed),
        spec=started_with if previous is None else None,
        previous=record_digest(context.records.read(previous.iteration)) if previous is not None else None,
        dataset=dataset,
        downloads=context.downloads.refs(spec),
        reference=previous.reference if previous is not None else checkpoint,
        artifacts=dict(made),
        metrics=metrics,
        position=position,
        epoch=epoch,
        index=index,
        next_kl_coef=experience.next_kl_coef if isinstance(experience, ExperienceRef) else spec.advantages.kl.coef,
        best=best_of(
            spec.registry.metric, metrics, iteration, checkpoint, records_before(context, previous, first_spec)
        ),
        cached_stages=context.timings.cached_stages(),
        attempt=attempt.number,
        rate_factor=attempt.rate_factor,
        changed=changed,
        retention=spec.retention,
        lease=context.lease.number if context.lease is not None else 0,
        committed_at_ms=int(time.time() * 1000),
    )
    if previous is None:
        return record
    sampler = previous.checkpoint if spec.schedule == "overlapped" else None
    return record.model_copy(update={**replayable(record, previous), "sampler": sampler})


def replayable(record: IterationRecord, previous: IterationRecord) -> dict[str, object]:
    """Where the record's checkpoint is not full: from which one on, and over which experiences, it is made again."""
    experience = record.made("experience")
    if record.checkpoint.full or experience is None:
        return {}
    return {"base": previous.base or previous.checkpoint, "replay": (*previous.replay, experience.bare())}


@stage("commit_iteration", retries=1)
def commit_iteration(context: RunContext, record: IterationRecord) -> IterationRecord:
    """Write a record, create-only; with the first one also the run's spec."""
    with room_for(f"the record of iteration {record.iteration} of run {context.run}"):
        committed = write_once(context, record)
    if context.lease is not None:
        context.lease.unpin_all()
    context.timings.restart()
    took = committed.metrics["seconds/iteration"]
    return completed(
        committed, f"iteration {committed.iteration} of {context.spec.iterations} is on record, after {took:.1f} s"
    )


def write_once(context: RunContext, record: IterationRecord) -> IterationRecord:
    """Create the record; where an earlier try already has, that one counts, if it made the same."""
    if record.iteration == 0 and context.records.read_spec() is None:
        context.records.create_spec(record.spec or context.spec.model_dump(mode="json"))
    try:
        context.records.commit(record.iteration, record.model_dump(mode="json"))
    except RecordExists:
        existing = record_at(context.records, record.iteration)
        if existing.checkpoint.digest != record.checkpoint.digest:
            raise
        return existing
    return record


def records_before(context: RunContext, previous: IterationRecord | None, first_spec: RunSpec) -> list[IterationRecord]:
    """What the best so far must be compared with: one record, unless what is measured has changed since."""
    if previous is None:
        return []
    records = context.records
    return compared_with(
        previous, first_spec, context.spec, partial(record_at, records), lambda: map(read_record, records.all())
    )


def staleness(spec: RunSpec, previous: IterationRecord | None) -> dict[str, float]:
    """With overlapped sampling: how many updates the policy that gave the responses is behind the one that learns."""
    if previous is None or spec.schedule == "synchronous":
        return {}
    return {"rollout/staleness": float(previous.sampler is not None)}


def throughput(metrics: dict[str, float], rollouts: RolloutsRef) -> dict[str, float]:
    """Response tokens per second: of sampling alone, and of the whole iteration."""
    tokens = rollouts.num_response_tokens
    sampling, whole = metrics.get("seconds/generate_rollouts", 0.0), metrics["seconds/iteration"]
    return {
        "throughput/rollout_tokens_per_second": tokens / sampling if sampling else 0.0,
        "throughput/tokens_per_second": tokens / whole if whole else 0.0,
    }
