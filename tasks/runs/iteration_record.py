"""The record of an iteration: the truth of the run, written once, after everything it names is durable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.artifacts import ArtifactRef
from ppo_core.spec import CheckpointSpec
from tasks.stages.references import CheckpointRef, DatasetRef, EvaluationRef, ExperienceRef, RolloutsRef, ScoresRef

ACCURACY = "evaluation/accuracy"


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
    told = "" if accuracy is None else f" (held-out accuracy {accuracy:.3f})"
    return f"best by {best.metric}: {best.value:.3f} at iteration {best.iteration}{told}"


class IterationRecord(BaseModel):
    """Everything that iteration `iteration` made and what the next one starts from.

    Record 0 is the start: checkpoint 0 and its evaluation. `position` is the data cursor: prompts drawn so far. Where
    the checkpoint is not full, `base` is the last one that is, and `replay` the experiences since. `attempt` counts the
    rollbacks before this iteration, `rate_factor` is what they left of the learning rates, `lease` tells the writers of
    a run apart, `retention` says for how long the checkpoint stays, `changed` has the keys of the spec that had other
    values than the run's `spec.json`, and `spec_digest` is that of both together. Record 0 has a copy of `spec.json`,
    and in `sft_losses` the loss of each step of a supervised start; each later one has in `previous` the digest of the
    record before it (see `tasks.runs.record_chain`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    iteration: int
    spec_digest: str
    spec: dict[str, Any] | None = None
    previous: str | None = None
    dataset: DatasetRef
    reference: CheckpointRef
    checkpoint: CheckpointRef
    base: CheckpointRef | None = None
    replay: tuple[ArtifactRef, ...] = ()
    rollouts: RolloutsRef | None = None
    scores: ScoresRef | None = None
    experience: ExperienceRef | None = None
    evaluation: EvaluationRef | None = None
    metrics: dict[str, float]
    sft_losses: tuple[float, ...] = ()
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
    def cursor(self) -> str:
        """The data cursor as people read it."""
        return f"epoch {self.epoch}, prompt {self.index}"

    def restoration(self) -> dict[str, ArtifactRef]:
        """What a training engine that is not warm needs besides the checkpoint, by the names of the job's inputs."""
        if self.base is None:
            return {}
        return {"base": self.base.bare(), **{f"replay_{n}": ref for n, ref in enumerate(self.replay)}}


def read_record(document: dict[str, Any]) -> IterationRecord:
    """A stored record."""
    return IterationRecord.model_validate(document)
