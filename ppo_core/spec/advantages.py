"""From scores to advantages: what shapes the rewards, what they cost in divergence, GAE, whitening."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from ppo_core.spec.reference import FixedReference, ReferenceSpec
from ppo_core.spec.section import CoefficientSchedule, Fraction, NonNegative, Section, check_schedule

Estimator = Literal["k1", "k2", "k3", "abs"]
MinibatchWhitening = Literal["none", "centred", "scaled"]


class FixedKl(Section):
    """A KL coefficient that stays."""

    kind: Literal["fixed"] = Field("fixed", description="This kind")
    coef: NonNegative = Field(0.01, description="Price in reward of one nat of divergence")
    estimator: Estimator = Field("k1", description="Schulman's estimator of the divergence per token")
    length_normalised: bool = Field(False, description="The price is divided by the response's number of tokens")
    schedule: CoefficientSchedule = Field("constant", description="How coef falls over update.decay_iterations")
    final_fraction: Fraction = Field(0.0, description="With a schedule: it ends at this fraction of coef")

    @model_validator(mode="after")
    def _what_falls_is_there(self) -> Self:
        check_schedule(self, "schedule", coef="coef", final="final_fraction")
        return self


class AdaptiveKl(Section):
    """A KL coefficient steered to a target (Ziegler et al. 2019, section 2.2)."""

    kind: Literal["adaptive"] = Field("adaptive", description="This kind")
    coef: PositiveFloat = Field(0.05, description="In the first iteration")
    target: PositiveFloat = Field(6.0, description="KL per response (summed over its tokens)")
    horizon: PositiveInt = Field(10_000, description="In responses")
    estimator: Estimator = Field("k1", description="Schulman's estimator of the divergence per token")
    length_normalised: bool = Field(
        False, description="The price is divided by the response's number of tokens; the target is not"
    )


class OverlongSpec(Section):
    """A price on responses that near the length limit (Yu et al. 2025, DAPO, equation 13)."""

    buffer: PositiveInt = Field(
        description="The price grows from 0 over so many tokens before rollout.max_response_tokens"
    )
    penalty: PositiveFloat = Field(1.0, description="Subtracted from the score at the limit, never more")


class AdvantageSpec(Section):
    """From scores to advantages: reward shaping and GAE."""

    kl: FixedKl | AdaptiveKl = Field(
        FixedKl(), discriminator="kind", description="Price of leaving the reference: kind fixed or adaptive"
    )
    old_logprobs: Literal["trainer", "sampler"] = Field(
        "trainer",
        description="What the update's ratios are to: the trainer's probabilities, from a pass of the policy over the "
        "rollouts; or the sampler's own, which saves that pass and lets the ratios hold what the two disagree on",
    )
    score_norm: Literal["none", "std", "mean_std"] = Field(
        "none",
        description="Divide scores by the standard deviation of all scores of the run so far; mean_std: less their "
        "mean",
    )
    reference: ReferenceSpec = Field(
        FixedReference(), description="Whom the divergence is from: kind fixed (the start), every (iterations) or ema"
    )
    score_clip: PositiveFloat | None = Field(
        None, description="Scores, after score_norm, are clipped to [-score_clip, score_clip]"
    )
    missing_eos_penalty: NonNegative = Field(0.0, description="Subtracted from the score of an unfinished response")
    overlong: OverlongSpec | None = Field(
        None, description="A price on responses that near the length limit; none: they are free"
    )
    truncated: Literal["terminal", "bootstrap", "mask"] = Field(
        "terminal", description="A response cut by length: ends there, goes on with the critic's value, or is left out"
    )
    whiten_rewards: bool = Field(
        False, description="Scale an iteration's rewards per token to variance 1 before GAE; their mean stays"
    )
    gamma: Fraction = Field(1.0, description="Discount per token")
    gae_lambda: Fraction = Field(0.95, description="GAE's trade of bias (0) against variance (1)")
    gae_lambda_alpha: PositiveFloat | None = Field(
        None,
        description="In its place a lambda by length, 1 - 1 / (alpha * tokens) and at least 0; 0.05 in the source "
        "(VAPO)",
    )
    critic_gae_lambda: Fraction | None = Field(
        None, description="Another lambda for the critic's targets, 1 in VC-PPO and VAPO; none: the policy's"
    )
    whiten: bool | Literal["minibatch"] = Field(
        True, description="Scale advantages to mean 0 and variance 1, over the iteration (true) or over each minibatch"
    )
    whiten_centred: bool = Field(
        True, description="Whitening takes the mean off; false: it divides by the root mean square, and no sign changes"
    )

    @property
    def minibatch_whitening(self) -> MinibatchWhitening:
        """What the update does to the advantages of each minibatch."""
        if self.whiten != "minibatch":
            return "none"
        return "centred" if self.whiten_centred else "scaled"

    @model_validator(mode="after")
    def _one_lambda(self) -> Self:
        default = type(self).model_fields["gae_lambda"].default
        if self.gae_lambda_alpha is not None and self.gae_lambda != default:
            raise ValueError(
                f"gae_lambda={self.gae_lambda:g} has no effect with gae_lambda_alpha={self.gae_lambda_alpha:g}, which "
                "gives each response a lambda by its length: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_centred_is_whitened(self) -> Self:
        if not self.whiten and not self.whiten_centred:
            raise ValueError(
                "whiten_centred=false has no effect with whiten=false: leave it out, or set whiten to true or minibatch"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _fixed_unless_said(cls, values: Any) -> Any:
        """`kl: {coef: 0.1}` means a fixed coefficient."""
        kl = values.get("kl") if isinstance(values, dict) else None
        return {**values, "kl": {"kind": "fixed", **kl}} if isinstance(kl, dict) else values
