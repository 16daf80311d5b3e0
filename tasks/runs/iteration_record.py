"""The record of an iteration: the truth of the run, written once, after everything it names is durable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, model_validator

from infra.artifacts import ArtifactRef
from infra.runs.records import RecordCorrupted
from ppo_core.spec import CheckpointSpec
from tasks.stages.references import CheckpointRef, DatasetRef, DownloadRef, EvaluationRef, StageRef
from tasks.stages.table import BY_NAME, PREVIOUS, REFERENCE, SAMPLER

ACCURACY = "evaluation/accuracy"


class RecordsOfEarlierVersion(RecordCorrupted):
    """The records of a run have a form that an earlier version wrote."""


class RecordOfNewerVersion(RecordCorrupted):
    """A record is what was written, and none that this version can read."""


NEWER = "use the version of ppoflow that wrote it"


class Attempt(BaseModel):
    """How often the run was rolled back before an iteration, and what that left of its learning rates."""

    model_config = ConfigDict(frozen=True)

    number: int = 0
    rate_factor: float = 1.0


class Best(BaseModel):
    """The best policy so far, by `metric`."""

    model_config = ConfigDict(frozen=True)

    metric: str
    iteration: int
    value: float | None
    checkpoint: CheckpointRef


def best_in_words(best: Best, metrics: Mapping[str, float]) -> str:
    """Which policy is the best, by what, and how good it is; `metrics` are those of its iteration."""
    if best.value is None:
        return f"best is iteration {best.iteration}, the last one ({best.metric} was never measured)"
    accuracy = metrics.get(ACCURACY)
    held_out = "" if accuracy is None else f" (held-out accuracy {accuracy:.3f})"
    return f"best by {best.metric}: {best.value:.3f} at iteration {best.iteration}{held_out}"


def _typed(artifacts: Any) -> Any:
    """The reference of each stage as the class of that stage."""
    if not isinstance(artifacts, dict):
        return artifacts
    unknown = sorted(set(artifacts) - set(BY_NAME))
    if unknown:
        raise ValueError(f"this version has no stage {', '.join(unknown)}")
    return {name: BY_NAME[name].made.model_validate(ref) for name, ref in artifacts.items()}


class IterationRecord(BaseModel):
    """Everything that iteration `iteration` made and what the next one starts from.

    `artifacts` has what each stage made, by the stage's name (see `tasks.stages.table`); record 0 is the start: a
    fine-tuned model where there is one, checkpoint 0 and its evaluation. `dataset` and `reference` are the whole run's;
    so are `downloads`, what its names of the hub are.
    `position` is the data cursor: prompts drawn so far. Where the checkpoint is not full, `base` is the last one that
    is, and `replay` the experiences since. `attempt` counts the rollbacks before this iteration, `rate_factor` is what
    they left of the learning rates, `lease` tells the writers of a run apart, `retention` says for how long the
    checkpoint stays, `changed` has the keys of the spec that had other values than the run's `spec.json`, and
    `spec_digest` is that of both together. Record 0 has a copy of `spec.json`; each later one has in `previous` the
    digest of the record before it (see `tasks.runs.record_chain`). `sampler` is the checkpoint that the next
    iteration's responses are sampled from; None: its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    iteration: int
    spec_digest: str
    spec: dict[str, Any] | None = None
    previous: str | None = None
    dataset: DatasetRef
    downloads: tuple[DownloadRef, ...] = ()
    reference: CheckpointRef
    artifacts: Annotated[dict[str, SerializeAsAny[StageRef]], BeforeValidator(_typed)]
    base: CheckpointRef | None = None
    replay: tuple[ArtifactRef, ...] = ()
    sampler: CheckpointRef | None = None
    metrics: dict[str, float]
    position: int
    epoch: int
    index: int
    next_kl_coef: float
    best: Best
    cached_stages: list[str] = []
    violations: list[str] = []
    attempt: int = 0
    rate_factor: float = 1.0
    forked_from: str | None = None
    changed: dict[str, Any] = {}
    retention: CheckpointSpec = CheckpointSpec()
    lease: int = 0
    committed_at_ms: int

    @property
    def attempt_settings(self) -> Attempt:
        """The attempt that it was made in."""
        return Attempt(number=self.attempt, rate_factor=self.rate_factor)

    def made(self, kind: str) -> StageRef | None:
        """What of this kind the iteration made."""
        return made_of_kind(self.artifacts, kind)

    @property
    def checkpoint(self) -> CheckpointRef:
        """The policy that the iteration ended with."""
        return cast(CheckpointRef, self.made("checkpoint"))

    @property
    def next_sampler(self) -> CheckpointRef:
        """The checkpoint whose policy gives the next iteration's responses."""
        return self.sampler or self.checkpoint

    @property
    def evaluation(self) -> EvaluationRef | None:
        """How good that policy is; None for an iteration that was not evaluated."""
        return cast(EvaluationRef | None, self.made("evaluation"))

    def sources(self, previous: IterationRecord | None) -> dict[str, StageRef]:
        """What the stages of the iteration were given, by the names of the table; `previous` is the record before."""
        sources = {"dataset": self.dataset, REFERENCE: self.reference, **{r.kind: r for r in self.artifacts.values()}}
        if previous is None:
            return sources
        return {**sources, PREVIOUS: previous.checkpoint, SAMPLER: previous.next_sampler}

    @model_validator(mode="after")
    def _has_a_checkpoint(self) -> Self:
        if self.made("checkpoint") is None:
            raise ValueError("artifacts hold no checkpoint")
        return self

    @property
    def cursor(self) -> str:
        """The data cursor as people read it."""
        return f"epoch {self.epoch}, prompt {self.index}"

    def carried(self) -> dict[str, dict[str, float]]:
        """What each stage left for the next iteration, by its name."""
        return {name: ref.carried for name, ref in self.artifacts.items()}

    def restoration(self) -> dict[str, ArtifactRef]:
        """What a training engine that is not warm needs besides the checkpoint, by the names of the job's inputs."""
        if self.base is None:
            return {}
        replayed = {f"replay_{n}": ref for n, ref in enumerate(self.replay)}
        # An update that is replayed may have compared with it, whatever the next one does.
        return {"base": self.base.bare(), "reference": self.reference.bare(), **replayed}


@dataclass(frozen=True)
class ChainedRecord:
    """A record and the digest of the document that it was read from."""

    record: IterationRecord
    digest: str


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


def resume_inputs(record: IterationRecord, *, best: bool = False) -> list[tuple[int, ArtifactRef]]:
    """What going on from a record needs, each with the iteration that made it, in the order of making.

    With `best` also the best policy, which only the end of a run needs.
    """
    last = record.iteration
    needs: list[tuple[int, ArtifactRef]] = [(0, record.reference)]
    if record.base is not None:
        needs.append((last - len(record.replay), record.base))
    needs += [(last - len(record.replay) + n, ref) for n, ref in enumerate(record.replay, 1)]
    if record.sampler is not None:
        needs.append((last - 1, record.sampler))
    needs.append((last, record.checkpoint))
    if best:
        needs.append((record.best.iteration, record.best.checkpoint))
    seen: dict[tuple[str, str], tuple[int, ArtifactRef]] = {(ref.kind, ref.key): (n, ref) for n, ref in needs}
    return sorted(seen.values(), key=lambda need: (need[0], need[1].kind == "checkpoint"))


def made_of_kind(artifacts: Mapping[str, StageRef], kind: str) -> StageRef | None:
    """What of the artifacts of one iteration is of this kind."""
    return next((ref for ref in artifacts.values() if ref.kind == kind), None)


def read_record(document: dict[str, Any]) -> IterationRecord:
    """A stored record. Raises RecordsOfEarlierVersion for one of an earlier form, ValidationError where it is none."""
    if "checkpoint" in document and "artifacts" not in document:
        raise RecordsOfEarlierVersion(
            f"run {document.get('run', '?')} is of a form that this version does not read, for its records do not name "
            "what each stage made: use the version of ppoflow that wrote it, or train again under another name"
        )
    return IterationRecord.model_validate(document)
