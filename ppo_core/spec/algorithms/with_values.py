"""PPO and its relatives, which learn from values: of a critic, or of a head on the policy."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, ValidationInfo, model_validator

from ppo_core.spec.advantages import AdvantageSpec
from ppo_core.spec.algorithms.algorithm import Algorithm
from ppo_core.spec.section import PositiveWeight, Weight, refuse_idle
from ppo_core.spec.sections import RolloutSpec
from ppo_core.spec.update import UpdateSpec


class PpoSpec(Algorithm):
    """PPO with a critic of its own and GAE."""

    kind: Literal["ppo"] = Field("ppo", description="This algorithm")


class VapoSpec(Algorithm):
    """PPO as in VAPO (Yue et al. 2025): lambdas of its own, and a language-model loss on correct responses."""

    ALPHA: ClassVar[float | None] = 0.05
    kind: Literal["vapo"] = Field("vapo", description="This algorithm")
    lm_coef: Weight = Field(
        0.1, description="Weight of the language-model loss, per token of the minibatch's correct responses"
    )
    correct_score: float = Field(
        1.0, description="A response is correct where its score, before score_norm and score_clip, is at least this"
    )

    @model_validator(mode="after")
    def _what_is_imitated_counts(self, info: ValidationInfo) -> Self:
        if not self.lm_coef and info.context:  # a run's record may be older than this rule
            refuse_idle(self, "correct_score", beside="lm_coef=0", remedy="set lm_coef above 0")
        return self

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """One lambda for all responses, besides."""
        found, value = super().problems(rollout, advantages, update, written=written), advantages.gae_lambda
        fields = type(advantages).model_fields
        if value != fields["gae_lambda"].default or (written and "gae_lambda" in advantages.model_fields_set):
            found.append(
                f"advantages.gae_lambda={value:g} has no effect with algorithm.kind={self.kind}, which gives each "
                f"response a lambda by its length (advantages.gae_lambda_alpha, {self.ALPHA} where that is none): "
                "leave it out, or set algorithm.kind to ppo"
            )
        return found

    def notes(self, update: UpdateSpec) -> list[str]:
        """A critic that the policy learns from at once."""
        if update.critic_warmup_iterations:
            return []
        return [
            "algorithm.kind=vapo without critic warm-up: VAPO trains the critic alone first; set "
            "update.critic_warmup_iterations, 50 in examples/recipes/vapo.yaml"
        ]


class PpoSharedSpec(Algorithm):
    """PPO with a value head on the policy in place of a critic, and one loss for both."""

    kind: Literal["ppo_shared"] = Field("ppo_shared", description="This algorithm")
    value_coef: PositiveWeight = Field(0.1, description="Weight of the value loss (half a squared error) in the loss")

    MEANINGLESS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("update.critic_learning_rate", "update.critic_warmup_iterations"),
        "policy and values share one network; algorithm.value_coef weights the value loss",
    )


class KlPenaltyPpoSpec(Algorithm):
    """PPO with a KL penalty towards the old policy in place of the clip (Schulman et al. 2017, section 4)."""

    kind: Literal["kl_penalty_ppo"] = Field("kl_penalty_ppo", description="This algorithm")
    coef: float = Field(
        1.0, ge=1e-6, le=1e6, description="Penalty per nat of KL(old policy, policy) per token, in the first iteration"
    )
    target: PositiveFloat | None = Field(
        0.01,
        description="Target KL per token after an update: coef doubles above 1.5 times it, halves below; none: fixed",
    )

    MEANINGLESS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("update.clip_low", "update.clip_high", "update.dual_clip"), "it clips no ratio"
    )

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A single step, which begins at the old policy, where the penalty is 0 and so is its gradient, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if written and update.num_steps == 1 and advantages.old_logprobs == "trainer":
            found.append(
                f"algorithm.kind={self.kind} with update.num_ppo_epochs=1 and num_minibatches=1: the only step "
                "begins at the old policy, where the penalty has no gradient; raise one of them, or set algorithm.kind "
                "to reinforce"
            )
        return found
