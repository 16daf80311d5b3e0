"""References to stored artifacts, each with the facts that later stages and people ask for. Small, frozen, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field

from infra.artifacts import ArtifactRef

USES = {"train": "train on", "eval": "evaluate with", "sft": "start from"}


class StageRef(ArtifactRef):
    """An artifact that a stage made, with the metrics it measured.

    `carried` are numbers that go on over iterations, such as running means: what it left for the next iteration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    metrics: dict[str, float] = Field(default_factory=dict)
    carried: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def of(cls, ref: ArtifactRef, stats: dict[str, Any]) -> Self:
        """The reference with those facts of the artifact's `stats.json` that this class has fields for."""
        facts = {name: value for name, value in stats.items() if name in cls.model_fields}
        return cls(kind=ref.kind, uri=ref.uri, digest=ref.digest, **facts)

    def in_words(self) -> str:
        """What came out, in a few words."""
        return self.measured({name.rpartition("/")[2]: f"{name}:.3f" for name in self.metrics}) or self.kind

    def measured(self, wanted: Mapping[str, str]) -> str:
        """Those of the metrics that are there, by what they are called in words, each as `NAME:FORMAT`.

        >>> ref.measured({"mean": "score/mean:.2f", "unscored": "score/unscored:.0f"})
        'mean 1.04, unscored 0'
        """
        parts = {words: metric.rpartition(":")[::2] for words, metric in wanted.items()}
        return ", ".join(
            f"{words} {self.metrics[name]:{form}}" for words, (name, form) in parts.items() if name in self.metrics
        )


class DownloadRef(StageRef):
    """What a spec's `name` of the hub was: files of a repository at a commit."""

    name: str
    repository: str
    commit: str
    size: int

    def in_words(self) -> str:
        return f"{self.name} is {self.repository} at commit {self.commit}, {self.size / 2**20:.1f} MiB"


class DatasetRef(StageRef):
    """Prompts: `counts` has the rows of each split; `context_length` is the model's (None: no limit)."""

    counts: dict[str, int]
    context_length: int | None = None

    def in_words(self) -> str:
        return ", ".join(f"{rows:,} rows to {USES.get(split, split)}" for split, rows in self.counts.items() if rows)


class ModelRef(StageRef):
    """A fine-tuned model, with the loss of each of its steps."""

    losses: tuple[float, ...]

    def in_words(self) -> str:
        return f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {len(self.losses)} supervised steps"


class CheckpointRef(StageRef):
    """The policy; where it is `full`, with all that is trained beside it and the optimizers."""

    full: bool = True

    def in_words(self) -> str:
        steps = {"entropy": "policy/entropy:.3f", "clip fraction": "policy/clip_fraction:.4f"}
        return self.measured({"optimizer steps": "update/optimizer_steps:.0f"} | steps) or "the policy to start from"


class RolloutsRef(StageRef):
    """Sampled responses."""

    num_responses: int
    num_response_tokens: int

    @property
    def batches(self) -> int:
        """How often the prompts of an iteration were drawn for it: more than once with rollout.dynamic_sampling."""
        return int(self.metrics.get("rollout/batches", 1))

    def in_words(self) -> str:
        return f"{self.num_responses:,} responses, {self.num_response_tokens:,} tokens"


class ScoresRef(StageRef):
    """Scores of rollouts."""

    def in_words(self) -> str:
        return self.measured({"mean": "score/mean:.3f", "unscored": "score/unscored:.0f"})


class ExperienceRef(StageRef):
    """What an update learns from; `next_kl_coef` is the coefficient of the iteration after this one."""

    next_kl_coef: float
    num_tokens: int

    def in_words(self) -> str:
        return f"{self.num_tokens:,} tokens to learn from, " + self.measured({"KL": "kl/reference:.3f"})


class EvaluationRef(StageRef):
    """Held-out responses and their scores; a few of them as `samples`."""

    samples: list[dict[str, Any]] = Field(default_factory=list)

    def in_words(self) -> str:
        return self.measured(
            {
                "accuracy": "evaluation/accuracy:.3f",
                "greedy": "evaluation/greedy_accuracy:.3f",
                "score": "evaluation/score:.3f",
            }
        )
