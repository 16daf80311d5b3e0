"""The record of an iteration: the truth of the run, written once, after everything it names is durable."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.runs import RecordExists
from ppo_core.records import content_digest
from tasks.references import CheckpointRef, DatasetRef, EvaluationRef, ExperienceRef, RolloutsRef, ScoresRef
from tasks.stage import stage
from tasks.workbench import Workbench


class Best(BaseModel):
    """The best policy so far, by `metric`."""

    model_config = ConfigDict(frozen=True)

    metric: str
    iteration: int
    value: float | None
    checkpoint: CheckpointRef


class IterationRecord(BaseModel):
    """Everything that iteration `iteration` made and what the next one starts from.

    Record 0 is the start: checkpoint 0 and its evaluation. `position` is the data cursor: prompts drawn so far.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    iteration: int
    spec_digest: str
    dataset: DatasetRef
    reference: CheckpointRef
    checkpoint: CheckpointRef
    rollouts: RolloutsRef | None = None
    scores: ScoresRef | None = None
    experience: ExperienceRef | None = None
    evaluation: EvaluationRef | None = None
    metrics: dict[str, float]
    position: int
    epoch: int
    index: int
    next_kl_coef: float
    best: Best
    cached_stages: list[str] = []
    committed_at_ms: int

    @property
    def cursor(self) -> str:
        """The data cursor as people read it."""
        return f"epoch {self.epoch}, prompt {self.index}"


@stage("commit_iteration", retries=1)
def commit_iteration(
    bench: Workbench,
    *,
    iteration: int,
    previous: IterationRecord | None,
    dataset: DatasetRef,
    checkpoint: CheckpointRef,
    rollouts: RolloutsRef | None = None,
    scores: ScoresRef | None = None,
    experience: ExperienceRef | None = None,
    evaluation: EvaluationRef | None = None,
) -> IterationRecord:
    """Write the record of `iteration`, create-only; with the first one also the run's spec."""
    spec = bench.spec
    parts = [rollouts, scores, experience, checkpoint, evaluation]
    metrics: dict[str, float] = {}
    for part in parts:
        metrics |= part.metrics if part is not None else {}
    cached = bench.timings.cached_stages()
    metrics |= bench.timings.measured()
    if rollouts is not None:
        metrics |= throughput(metrics, rollouts)
    drawn = spec.rollout.prompts_per_iteration if previous is not None else 0
    position = (previous.position if previous is not None else 0) + drawn
    epoch, index = divmod(position, dataset.counts["train"])
    record = IterationRecord(
        run=bench.run,
        iteration=iteration,
        spec_digest=content_digest(spec.document()),
        dataset=dataset,
        reference=previous.reference if previous is not None else checkpoint,
        checkpoint=checkpoint,
        rollouts=rollouts,
        scores=scores,
        experience=experience,
        evaluation=evaluation,
        metrics=metrics,
        position=position,
        epoch=epoch,
        index=index,
        next_kl_coef=experience.next_kl_coef if experience is not None else spec.advantages.kl.coef,
        best=best_of(spec.registry.metric, metrics, iteration, checkpoint, records_before(bench, previous)),
        cached_stages=cached,
        committed_at_ms=int(time.time() * 1000),
    )
    committed = write_once(bench, record)
    bench.timings.restart()
    return committed


def write_once(bench: Workbench, record: IterationRecord) -> IterationRecord:
    """Create the record; where an earlier try already has, that one counts, if it made the same."""
    if record.iteration == 0 and bench.records.read_spec() is None:
        bench.records.create_spec(bench.spec.document())
    try:
        bench.records.commit(record.iteration, record.model_dump(mode="json"))
    except RecordExists:
        existing = read_record(bench.records.read(record.iteration))
        if existing.checkpoint.digest != record.checkpoint.digest:
            raise
        return existing
    return record


def best_of(
    metric: str,
    metrics: dict[str, float],
    iteration: int,
    checkpoint: CheckpointRef,
    before: Iterable[IterationRecord],
) -> Best:
    """The iteration with the highest value of `metric`; where it was never measured, the latest."""
    best = Best(metric=metric, iteration=iteration, value=metrics.get(metric), checkpoint=checkpoint)
    for record in before:
        value = record.metrics.get(metric)
        if value is not None and (best.value is None or value >= best.value):
            best = Best(metric=metric, iteration=record.iteration, value=value, checkpoint=record.checkpoint)
    return best


def records_before(bench: Workbench, previous: IterationRecord | None) -> Iterator[IterationRecord]:
    """What the best so far must be compared with: one record, unless the metric has changed since."""
    if previous is None:
        return
    if previous.best.metric != bench.spec.registry.metric:
        yield from (read_record(document) for document in bench.records.all())
    elif previous.best.iteration == previous.iteration:
        yield previous
    else:
        yield read_record(bench.records.read(previous.best.iteration))


def throughput(metrics: dict[str, float], rollouts: RolloutsRef) -> dict[str, float]:
    """Response tokens per second: of sampling alone, and of the whole iteration."""
    tokens = rollouts.num_response_tokens
    sampling, whole = metrics.get("seconds/generate_rollouts", 0.0), metrics["seconds/iteration"]
    return {
        "throughput/rollout_tokens_per_second": tokens / sampling if sampling else 0.0,
        "throughput/tokens_per_second": tokens / whole if whole else 0.0,
    }


def read_record(document: dict[str, Any]) -> IterationRecord:
    """A stored record."""
    return IterationRecord.model_validate(document)
