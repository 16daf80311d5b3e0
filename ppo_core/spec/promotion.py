"""The section of a run's spec that says when its policy may take the champion's place."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from ppo_core.spec.section import Section
from ppo_core.spec.sections import mlflow_alias


class PromotionSpec(Section):
    """The gates between a candidate and the champion's alias. Nothing of this changes what a run computes."""

    alias: str = Field("champion", description="The alias that moves to a candidate which passes every gate")
    metric: Literal["score", "accuracy"] = Field(
        "score",
        description="What is compared, prompt by prompt: the score, or whether it is at least evaluation.pass_score",
    )
    min_gain: float = Field(
        0.0,
        description="The whole confidence interval of the mean gain over the champion must lie above this; negative: "
        "the candidate may be that much worse",
    )
    confidence: float = Field(0.95, ge=0.5, lt=1.0, description="Of that two-sided interval")
    resamples: PositiveInt = Field(10_000, ge=100, le=1_000_000, description="Paired bootstrap resamples")
    max_kl: PositiveFloat | None = Field(
        None,
        description="Highest KL to the reference per response, as the candidate's run measured it, nats",
    )
    max_length_growth: PositiveFloat | None = Field(
        None, description="Mean response length over the champion's: 1.5 means half as long again; none: off"
    )
    approval: bool = Field(False, description="Wait for a person's yes in Prefect's UI before the alias moves")
    approval_timeout_h: PositiveFloat = Field(24.0, le=720.0, description="An unanswered wait ends the flow, hours")

    @field_validator("alias")
    @classmethod
    def _known_to_mlflow(cls, alias: str) -> str:
        return mlflow_alias(alias)
