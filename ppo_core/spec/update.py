"""The update of policy and critic: passes, rates, clips and what else is part of the loss."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, model_validator

from ppo_core.spec.advantages import AdvantageSpec, FixedKl
from ppo_core.spec.section import (
    Beta,
    CoefficientSchedule,
    Fraction,
    LearningRate,
    Section,
    Weight,
    WeightDecay,
    check_schedule,
    refuse_idle,
)


class UpdateSpec(Section):
    """The update of policy and critic."""

    num_ppo_epochs: PositiveInt = Field(2, le=100, description="Passes over an iteration's responses")
    num_minibatches: PositiveInt = Field(4, description="Optimizer steps per PPO epoch")
    learning_rate: LearningRate = Field(1e-4, description="Learning rate of the policy, after the warm-up")
    critic_learning_rate: LearningRate = Field(1e-3, description="Learning rate of the critic, after the warm-up")
    warmup_iterations: int = Field(
        0, ge=0, description="Iterations of linear warm-up of both rates; at most those of the run"
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="Decay of both rates after the warm-up; constant: none"
    )
    decay_iterations: PositiveInt | None = Field(
        None, description="Iterations until the decay ends, after which both rates are at the fraction; none: all"
    )
    final_lr_fraction: Fraction = Field(0.1, description="Both rates decay to this fraction of themselves")
    critic_warmup_iterations: int = Field(
        0,
        ge=0,
        description="Number of first iterations that train the critic only; the policy's schedule begins after them",
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-5, ge=1e-30, le=1.0, description="AdamW's epsilon; in float32, below 1e-38 it is 0")
    weight_decay: WeightDecay = Field(0.0, description="Decoupled weight decay of AdamW")
    clip_low: Fraction = Field(
        0.2, description="The probability ratio to the old policy is clipped below at 1 - clip_low"
    )
    clip_high: float = Field(0.2, gt=0.0, le=10.0, description="The ratio is clipped above at 1 + clip_high")
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        None, description="Dual-clip PPO: bounds the loss where the advantage is negative, usually 3; none: no bound"
    )
    value_clip: PositiveFloat | None = Field(
        None,
        description="Values are clipped to this distance from the old ones in the critic's loss; none: no clipping",
    )
    entropy_coef: Weight = Field(0.0, description="Weight of the entropy bonus per token")
    entropy_schedule: CoefficientSchedule = Field(
        "constant", description="How entropy_coef falls over decay_iterations, from the policy's first iteration on"
    )
    final_entropy_fraction: Fraction = Field(0.0, description="With a schedule: entropy_coef ends at this fraction")
    kl_loss_coef: Weight = Field(
        0.0,
        description="Weight of the KL to the reference in the loss, per token, besides the KL penalty in the reward: "
        "advantages.kl.coef has to be written out then (0: none)",
    )
    kl_loss_schedule: CoefficientSchedule = Field(
        "constant", description="How kl_loss_coef falls over decay_iterations, from the policy's first iteration on"
    )
    final_kl_loss_fraction: Fraction = Field(0.0, description="With a schedule: kl_loss_coef ends at this fraction")
    kl_loss_estimator: Literal["k2", "k3", "k1+", "k3+", "full"] = Field(
        "k2",
        description="Estimator of the KL in the loss. k2 has the KL's gradient; GRPO uses k3; k1+ and k3+ have the "
        "value of k1 and k3 with the gradient of k2; full sums over the vocabulary, for one more pass of the reference "
        "per step",
    )
    aggregation: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"] = Field(
        "token_mean",
        description="How token losses are averaged: over tokens, or over responses (of their sums, means, or sums "
        "divided by rollout.max_response_tokens)",
    )
    importance_correction: Literal["none", "token", "sequence", "mask"] = Field(
        "none",
        description="Importance weights of the policy's loss and of KL estimates in it, for the mismatch of trainer "
        "and sampler: per token, per response (sequence), "
        "or mask: leave out tokens whose weight is not between importance_floor and importance_cap",
    )
    importance_cap: Annotated[float, Field(ge=1.0)] = Field(2.0, description="Largest importance weight")
    importance_floor: Fraction = Field(0.5, description="With mask: smallest importance weight")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm")
    max_kl: PositiveFloat | None = Field(
        None, description="End the PPO epochs of an iteration when the KL per token exceeds this; none: no limit"
    )
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="Decay per iteration of a moving average of the policy, kept in checkpoints; none: no average"
    )

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.num_ppo_epochs * self.num_minibatches

    @property
    def exact_kl_loss(self) -> bool:
        """Whether the loss has a KL over the whole vocabulary, which needs the reference itself."""
        return self.kl_loss_coef > 0 and self.kl_loss_estimator == "full"

    @model_validator(mode="after")
    def _constant_rates_stay(self) -> Self:
        if self.schedule == "constant":
            refuse_idle(
                self, "final_lr_fraction", beside="schedule=constant", remedy="set schedule to linear or cosine"
            )
        return self

    @model_validator(mode="after")
    def _limits_have_something_to_limit(self) -> Self:
        if self.num_ppo_epochs == 1:
            beside = "num_ppo_epochs=1 (it leaves out later epochs)"
            refuse_idle(self, "max_kl", beside=beside, remedy="set num_ppo_epochs to 2 or more")
        if not self.kl_loss_coef:
            refuse_idle(self, "kl_loss_estimator", beside="kl_loss_coef=0", remedy="set kl_loss_coef above 0")
        return self

    @model_validator(mode="after")
    def _what_falls_is_there(self) -> Self:
        check_schedule(self, "entropy_schedule", coef="entropy_coef", final="final_entropy_fraction")
        check_schedule(self, "kl_loss_schedule", coef="kl_loss_coef", final="final_kl_loss_fraction")
        return self

    @model_validator(mode="after")
    def _bounds_have_a_correction(self, info: ValidationInfo) -> Self:
        beside, remedy = f"importance_correction={self.importance_correction}", "set importance_correction to mask"
        if self.importance_correction == "none":
            refuse_idle(self, "importance_cap", beside=beside, remedy=f"{remedy}, token or sequence")
        masks = self.importance_correction == "mask"
        if info.context and masks and self.importance_floor == self.importance_cap:
            raise ValueError(
                f"importance_floor={self.importance_floor:g} and importance_cap={self.importance_cap:g} leave out "
                "every token whose weight is not exactly that: lower the floor (0.5), or raise the cap (2)"
            )
        if self.importance_correction != "mask":
            refuse_idle(self, "importance_floor", beside=beside, remedy=remedy)
        return self

    def notes(self, iterations: int, advantages: AdvantageSpec) -> list[str]:
        """A warm-up that is longer than its schedule is cut to it; a clip that a single step does not feel."""
        said = []
        clips = [name for name in ("clip_low", "clip_high") if name in self.model_fields_set]
        if self.num_steps == 1 and advantages.old_logprobs == "trainer" and clips:
            settings = " and ".join(f"update.{name}={vars(self)[name]:g}" for name in clips)
            said.append(f"{settings} without effect: an iteration's only optimizer step begins at the old policy")
        end = self.decay_iterations or iterations
        last = end - self.critic_warmup_iterations
        if self.warmup_iterations <= last:
            return said
        whose = "of the run" if end == iterations else "of the schedule (update.decay_iterations)"
        whose += " after those of the critic alone" if self.critic_warmup_iterations else ""
        return [*said, f"update.warmup_iterations={self.warmup_iterations} is cut to the {last} iterations {whose}"]

    def problems(self, advantages: AdvantageSpec, *, written: bool) -> list[str]:
        """Settings of the two sections that leave each other without effect, or price the KL twice unasked.

        `written`: whether a person wrote the spec; a run's record has the end of its schedule also where nothing falls.
        """
        kl, reference, found = advantages.kl, advantages.reference.kind, list[str]()
        if self.exact_kl_loss and reference != "fixed":
            found.append(
                "update.kl_loss_estimator=full needs a reference that stays, and advantages.reference.kind="
                f"{reference} replaces it: set that to fixed, or kl_loss_estimator to k2"
            )
        if self.kl_loss_coef and "coef" not in kl.model_fields_set:
            alone = "0" if isinstance(kl, FixedKl) else "0 with kind fixed"
            found.append(
                f"update.kl_loss_coef={self.kl_loss_coef:g} puts the KL into the loss, and the default "
                f"advantages.kl.coef={kl.coef:g} prices it in the reward too: set advantages.kl.coef to {alone} for "
                f"the loss alone, or to {kl.coef:g} to have both"
            )
        if reference != "fixed" and not self.kl_loss_coef and not kl.coef:
            found.append(
                f"advantages.reference.kind={reference} has no effect on what is learned with advantages.kl.coef=0 "
                "and update.kl_loss_coef=0: leave reference out, or set one of these above 0"
            )
        found += self._without_effect(advantages) if written else []
        schedules = {self.schedule, self.entropy_schedule, self.kl_loss_schedule}
        schedules |= {kl.schedule} if isinstance(kl, FixedKl) else set()
        if written and self.decay_iterations is not None and schedules == {"constant"}:
            found.append(
                f"update.decay_iterations={self.decay_iterations} has no effect with update.schedule=constant and no "
                "coefficient that has a schedule: leave it out, or set schedule to linear or cosine"
            )
        return found

    def _without_effect(self, advantages: AdvantageSpec) -> list[str]:
        """What the first step of an iteration does not feel, where there is no other; a reference that is the policy.

        In the first step the policy is the one that gave the old logprobs: ratios are 1, and values the old ones.
        """
        only, found = "update.num_ppo_epochs=1 and num_minibatches=1: the only step begins at the old", list[str]()
        more = "leave it out, or raise num_ppo_epochs or num_minibatches"
        if self.num_steps == 1 and self.dual_clip is not None and advantages.old_logprobs == "trainer":
            found.append(f"update.dual_clip={self.dual_clip:g} has no effect with {only} policy: {more}")
        if self.num_steps == 1 and self.value_clip is not None:
            found.append(f"update.value_clip={self.value_clip:g} has no effect with {only} values: {more}")
        reference = advantages.reference
        if reference.kind == "every" and reference.iterations == 1 and (advantages.kl.coef or self.num_steps == 1):
            found.append(
                "advantages.reference.iterations=1 makes the reference the policy that each iteration begins with, so "
                "that the KL in the reward (advantages.kl), and in the loss before the second step, is 0: raise it, or "
                "set advantages.kl.coef to 0, update.kl_loss_coef above 0 and update.num_minibatches to 2 or more"
            )
        return found
