"""References to stored artifacts, each with the facts that later stages and people ask for. Small, frozen, JSON."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from infra.artifacts import ArtifactRef


class StageRef(ArtifactRef):
    """An artifact that a stage made, with the metrics it measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metrics: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def of(cls, ref: ArtifactRef, stats: dict[str, Any]) -> StageRef:
        """The reference with those facts of the artifact's `stats.json` that this class has fields for."""
        facts = {name: value for name, value in stats.items() if name in cls.model_fields}
        return cls(kind=ref.kind, uri=ref.uri, digest=ref.digest, **facts)

    def bare(self) -> ArtifactRef:
        """What the store needs: kind, uri and digest."""
        return ArtifactRef(kind=self.kind, uri=self.uri, digest=self.digest)


class DatasetRef(StageRef):
    """Prompts: `counts` has the rows of each split; `context_length` is the model's (None: no limit)."""

    counts: dict[str, int]
    context_length: int | None = None


class CheckpointRef(StageRef):
    """The policy; where it is `full`, with critic and optimizers."""

    full: bool = True


class RolloutsRef(StageRef):
    """Sampled responses."""

    num_responses: int
    num_response_tokens: int


class ScoresRef(StageRef):
    """Scores of rollouts."""


class ExperienceRef(StageRef):
    """What an update learns from; `next_kl_coef` is the coefficient of the iteration after this one."""

    next_kl_coef: float
    num_tokens: int


class EvaluationRef(StageRef):
    """Held-out responses and their scores; a few of them as `samples`."""

    samples: list[dict[str, Any]] = Field(default_factory=list)
