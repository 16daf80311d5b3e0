"""The section of a run's spec that says when its policy may take the champion's place."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from ppo_core.spec.section import Section
from ppo_core.spec.sections import mlflow_alias

OF_THE_SCORE = ("score", "accuracy")
"""What can be compared besides single rewards."""


class PromotionSpec(Section):
    """The gates that a candidate must pass to become champion. None of them changes what a run computes."""

    alias: str = Field("champion", description="Alias that moves to a candidate that passes every gate")
    metric: str = Field(
        "score",
        description="What is compared per prompt: the score, accuracy (whether it reaches evaluation.pass_score), or "
        "one reward by its name, for example a gold reward of weight 0",
    )
    min_gain: float = Field(
        0.0,
        description="The confidence interval of the mean gain over the champion must lie above this; negative: the "
        "candidate may be that much worse",
    )
    confidence: float = Field(0.95, ge=0.5, lt=1.0, description="Confidence level of that two-sided interval")
    resamples: PositiveInt = Field(10_000, ge=100, le=1_000_000, description="Paired bootstrap resamples")
    max_kl: PositiveFloat | None = Field(
        None,
        description="Highest KL to the reference per response in the candidate's run, nats; none: no limit",
    )
    max_length_growth: PositiveFloat | None = Field(
        None, description="Highest ratio of mean response length to the champion's, 1.5 for 50 % longer; none: no limit"
    )
    approval: bool = Field(False, description="Wait for approval in Prefect's UI before the alias moves")
    approval_timeout_h: PositiveFloat = Field(
        24.0, le=720.0, description="Hours to wait for approval, after which the flow ends"
    )

    @field_validator("alias")
    @classmethod
    def _known_to_mlflow(cls, alias: str) -> str:
        return mlflow_alias(alias)

    def problems(self, candidates: str | None) -> list[str]:
        """`candidates` is the alias that every training run moves to its best policy: these gates guard another."""
        if self.alias != candidates:
            return []
        return [
            f"registry.alias={candidates} is promotion.alias too, so that every run of training would make its policy "
            "champion, past all gates: set one of them to another alias (by default registry.alias is candidate, and "
            "promotion.alias champion)"
        ]
