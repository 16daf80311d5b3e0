"""Two policies' answers to the same held-out prompts, side by side."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ppo_core.records import CompareJob
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef, EvaluationRef, StageRef
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import StageDefinition


class ComparisonRef(StageRef):
    """How much better the candidate is, prompt by prompt; on a few of them it is worse: `setbacks`."""

    pairs: int
    unscored: int
    better: int
    worse: int
    setbacks: list[dict[str, Any]] = Field(default_factory=list)

    def in_words(self) -> str:
        return f"of {self.pairs:,} prompts {self.better:,} better, {self.worse:,} worse"


COMPARE_POLICIES = StageDefinition("compare_policies", "comparison", "scoring", "compare_evaluations", ComparisonRef)


@stage(COMPARE_POLICIES.name)
def compare_policies(
    context: RunContext, candidate: EvaluationRef, champion: EvaluationRef, dataset: DatasetRef
) -> ComparisonRef:
    """The paired differences of the spec's metric, and what their bootstrap says of the gain."""
    spec = context.spec
    job = CompareJob(
        metric=spec.promotion.metric,
        pass_score=spec.evaluation.pass_score,
        max_failed_fraction=spec.reward.max_failed_fraction,
        confidence=spec.promotion.confidence,
        resamples=spec.promotion.resamples,
    )
    inputs = {"candidate": candidate, "champion": champion, "dataset": dataset}
    return run_cached(context, StageSpec(COMPARE_POLICIES, job, inputs))
