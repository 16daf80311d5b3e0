"""From scores to advantages: reward shaping, the KL penalty and its reference, GAE, whitening."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, model_validator

from ppo_core.spec.section import (
    CoefficientSchedule,
    Fraction,
    NonNegative,
    PositiveWeight,
    Section,
    Weight,
    check_schedule,
    refuse_idle,
)
from ppo_core.spec.sections import RolloutSpec

Estimator = Literal["k1", "k2", "k3", "abs"]
MinibatchWhitening = Literal["none", "centred", "scaled"]


class FixedKl(Section):
    """A fixed KL coefficient."""

    kind: Literal["fixed"] = Field("fixed", description="This kind")
    coef: Weight = Field(0.01, description="KL penalty subtracted from the reward, per nat")
    estimator: Estimator = Field("k1", description="Schulman's estimator of the KL per token")
    length_normalised: bool = Field(False, description="Divide the KL penalty by the response's number of tokens")
    schedule: CoefficientSchedule = Field(
        "constant", description="How coef falls over update.decay_iterations, from the policy's first iteration on"
    )
    final_fraction: Fraction = Field(0.0, description="With a schedule: coef ends at this fraction of itself")

    @model_validator(mode="after")
    def _what_falls_is_there(self) -> Self:
        check_schedule(self, "schedule", coef="coef", final="final_fraction")
        if not self.coef:
            refuse_idle(self, "estimator", "length_normalised", beside="coef=0", remedy="set coef above 0")
        return self


class AdaptiveKl(Section):
    """A KL coefficient that is adapted to reach a target KL (Ziegler et al. 2019, section 2.2)."""

    kind: Literal["adaptive"] = Field("adaptive", description="This kind")
    coef: PositiveWeight = Field(0.05, description="KL coefficient in the first iteration")
    target: PositiveFloat = Field(
        description="Target KL per response (summed over its tokens), nats; 6 is a usual value"
    )
    horizon: PositiveInt = Field(
        10_000, description="Responses over which the coefficient adapts: the more, the slower"
    )
    estimator: Estimator = Field("k1", description="Schulman's estimator of the divergence per token")
    length_normalised: bool = Field(
        False, description="Divide the KL penalty by the response's number of tokens; the target stays per response"
    )


class FixedReference(Section):
    """The policy that the run began with, throughout."""

    kind: Literal["fixed"] = Field("fixed", description="This kind")


class SteppedReference(Section):
    """The policy as it was not long ago, taken anew at intervals."""

    kind: Literal["every"] = Field("every", description="This kind")
    iterations: PositiveInt = Field(description="The policy becomes the reference every this many iterations")


class AveragedReference(Section):
    """A moving average of the policy."""

    kind: Literal["ema"] = Field("ema", description="This kind")
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.95, description="Decay of the moving average, per iteration"
    )


ReferenceSpec = Annotated[FixedReference | SteppedReference | AveragedReference, Field(discriminator="kind")]


class OverlongSpec(Section):
    """A penalty for responses close to the length limit (Yu et al. 2025, DAPO, equation 13)."""

    buffer: PositiveInt = Field(
        description="The penalty grows from 0 over this many tokens before rollout.max_response_tokens"
    )
    penalty: PositiveFloat = Field(
        1.0, le=1e15, description="Largest penalty, subtracted from the score of a response at the limit"
    )

    def problems(self, rollout: RolloutSpec) -> list[str]:
        """A buffer longer than a response, and prompts with limits of their own."""
        limit, column, found = rollout.max_response_tokens, rollout.max_response_tokens_column, list[str]()
        if self.buffer > limit:
            found.append(
                f"advantages.overlong.buffer={self.buffer} is longer than a response can be "
                f"(rollout.max_response_tokens={limit}): lower it to {limit} or less; a fifth of that is usual"
            )
        if column is not None:
            found.append(
                "advantages.overlong penalises responses close to rollout.max_response_tokens, but "
                f"rollout.max_response_tokens_column={column} gives prompts limits of their own: leave one out"
            )
        return found


LEAST_SHARE = 5.0
"""Of gae_lambda_alpha times the tokens of the longest response, where lambda is 0.8: below, a run says so."""


class AdvantageSpec(Section):
    """From scores to advantages: reward shaping and GAE."""

    kl: FixedKl | AdaptiveKl = Field(
        FixedKl(), discriminator="kind", description="KL penalty towards the reference: kind fixed or adaptive"
    )
    old_logprobs: Literal["trainer", "sampler"] = Field(
        "trainer",
        description="Old logprobs in the update's ratios. trainer: recomputed by a pass of the policy over rollouts; "
        "sampler: as vLLM reported them, which saves that pass (with ppo_shared it does not: the values need it) but "
        "puts the mismatch of the two into the ratios",
    )
    score_norm: Literal["none", "std", "mean_std"] = Field(
        "none",
        description="std: divide scores by the standard deviation of all scores of the run so far that were trained "
        "on (not of prompts that dynamic_sampling dropped); mean_std: subtract their mean first",
    )
    reference: ReferenceSpec = Field(
        FixedReference(),
        description="Model that the KL is measured against: kind fixed (the start), every (iterations) or ema",
    )
    score_clip: PositiveFloat | None = Field(
        None, description="Scores, after score_norm, are clipped to [-score_clip, score_clip]"
    )
    missing_eos_penalty: NonNegative = Field(
        0.0, le=1e15, description="Subtracted from the score of an unfinished response"
    )
    overlong: OverlongSpec | None = Field(
        None, description="Penalty for responses close to the length limit; none: no penalty"
    )
    truncated: Literal["terminal", "bootstrap", "mask"] = Field(
        "terminal",
        description="A response cut at the length limit: ends there, continues with the critic's value, or is left out",
    )
    whiten_rewards: bool = Field(
        False,
        description="Scale an iteration's per-token rewards to variance 1 before GAE, without shifting their mean",
    )
    gamma: Fraction = Field(1.0, description="Discount per token")
    gae_lambda: Fraction = Field(0.95, description="Lambda of GAE: 0 has the least variance, 1 the least bias")
    gae_lambda_alpha: PositiveFloat | None = Field(
        None,
        description="In place of gae_lambda, a lambda by response length, max(0, 1 - 1 / (alpha * tokens)); none: "
        "gae_lambda, but 0.05 with vapo",
    )
    critic_gae_lambda: Fraction | None = Field(
        None,
        description="Lambda for the critic's targets, 1 in VC-PPO; none: the same as the policy's, but 1 with vapo",
    )
    whiten: bool | Literal["minibatch"] | None = Field(
        None,
        description="Scale advantages to mean 0 and variance 1, over the iteration (true) or over each minibatch; "
        "none: true, but false with rloo and grpo, whose advantages compare the responses to one prompt already",
    )
    whiten_centred: bool = Field(
        True,
        description="Whitening subtracts the mean; false: it only divides by the root mean square, and no sign changes",
    )

    @property
    def minibatch_whitening(self) -> MinibatchWhitening:
        """What the update does to the advantages of each minibatch."""
        if self.whiten != "minibatch":
            return "none"
        return "centred" if self.whiten_centred else "scaled"

    @property
    def raw_score_clip(self) -> float | None:
        """Where scores as they were given are clipped; with score_norm they are only once the run's moments are known.

        >>> AdvantageSpec(score_clip=5).raw_score_clip, AdvantageSpec(score_clip=5, score_norm="std").raw_score_clip
        (5.0, None)
        """
        return self.score_clip if self.score_norm == "none" else None

    def notes(self, iterations: int, longest: int, own_alpha: float | None = None) -> list[str]:
        """A reference that does not move before the run is over, and what goes wrong with responses of few tokens, of
        which the `longest` may have so many. `own_alpha` is the algorithm's, which counts where none is set."""
        reference, found = self.reference, list[str]()
        alpha = own_alpha if self.gae_lambda_alpha is None else self.gae_lambda_alpha
        if reference.kind == "every" and reference.iterations >= iterations:
            found.append(
                f"advantages.reference.iterations={reference.iterations} is not below iterations={iterations}: the "
                "reference stays the start; lower it, or raise iterations"
            )
        if alpha is not None and alpha * longest < LEAST_SHARE:
            unset = " (the algorithm's own)" if self.gae_lambda_alpha is None else ""
            found.append(
                f"advantages.gae_lambda_alpha={alpha:g}{unset} gives the longest responses "
                f"(rollout.max_response_tokens={longest}) lambda {max(1 - 1 / (alpha * longest), 0):.2f}, and "
                f"those of up to {1 / alpha:g} tokens 0: the policy may learn nothing; {20 / longest:.2g} gives the "
                "longest 0.95"
            )
        if self.whiten_rewards:
            found.append(
                "advantages.whiten_rewards=true adds a constant to every token's reward, which pays or charges for "
                "length: watch rollout/response_length, or set advantages.score_norm to std instead"
            )
        return found

    @model_validator(mode="after")
    def _what_is_left_out_pays_nothing(self) -> Self:
        if self.truncated == "mask":
            beside = "truncated=mask (unfinished responses are left out)"
            refuse_idle(self, "missing_eos_penalty", beside=beside, remedy="set truncated to terminal or bootstrap")
        return self

    @model_validator(mode="after")
    def _one_lambda(self, info: ValidationInfo) -> Self:
        default = type(self).model_fields["gae_lambda"].default
        given = self.gae_lambda != default or (info.context and "gae_lambda" in self.model_fields_set)
        if self.gae_lambda_alpha is not None and given:
            raise ValueError(
                f"gae_lambda={self.gae_lambda:g} has no effect with gae_lambda_alpha={self.gae_lambda_alpha:g}, which "
                "gives each response a lambda by its length: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_centred_is_whitened(self) -> Self:
        if self.whiten is False:
            refuse_idle(self, "whiten_centred", beside="whiten=false", remedy="set whiten to true or minibatch")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fixed_unless_said(cls, values: Any) -> Any:
        """`kl: {coef: 0.1}` means a fixed coefficient."""
        kl = values.get("kl") if isinstance(values, dict) else None
        return {**values, "kl": {"kind": "fixed", **kl}} if isinstance(kl, dict) else values
