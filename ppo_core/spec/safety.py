"""The sections of a run's spec that keep it safe: what is checkpointed and kept, and what counts as divergence.

None of these changes what a healthy run computes, so all of them may change when a run goes on.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, model_validator

from ppo_core.spec.section import Fraction, NonNegative, Section, refuse_idle


class CheckpointSpec(Section):
    """What is written of an iteration's policy, critic and optimizer, and for how long it is kept."""

    every: PositiveInt = Field(
        1,
        description="Iterations between full checkpoints (with critic and optimizer state); a resume replays updates "
        "since the last one, to the same bytes. The policy is written in every iteration",
    )
    keep_last: PositiveInt | None = Field(
        None,
        description="Number of latest checkpoints to keep; none: all. The best and registered ones are always kept, "
        "and with guards.on_divergence=rollback at least the latest guards.rollback_iterations + 1",
    )
    keep_every: PositiveInt | None = Field(
        None, description="Also keep every checkpoint whose iteration is a multiple of this"
    )

    @model_validator(mode="after")
    def _what_is_kept_is_let_go_otherwise(self, info: ValidationInfo) -> Self:
        if self.keep_last is None and info.context:  # a run's record may be older than this rule
            refuse_idle(self, "keep_every", beside="keep_last=none, which keeps all", remedy="set keep_last")
        return self


class GuardsSpec(Section):
    """Limits that a healthy run never reaches. Without a value, a guard is off."""

    on_divergence: Literal["stop", "rollback", "warn"] = Field(
        "stop",
        description="stop: end the run and keep the evidence; rollback: return to an earlier iteration with lower "
        "learning rates and other samples; warn: print a warning and continue",
    )
    max_kl: PositiveFloat | None = Field(
        None, description="Highest KL to the reference per response (kl/reference), nats"
    )
    min_entropy: NonNegative | None = Field(None, description="Lowest entropy per token (policy/entropy), nats")
    max_length_growth: PositiveFloat | None = Field(
        None, description="Highest ratio of mean response length to that of iteration 1: 3 means three times as long"
    )
    min_length_growth: Fraction | None = Field(
        None, description="Lowest ratio of mean response length to that of iteration 1: 0.3 means a third as long"
    )
    max_clip_fraction: Fraction | None = Field(
        None, description="Highest share of tokens whose ratio is clipped (policy/clip_fraction)"
    )
    max_sampler_difference: PositiveFloat | None = Field(
        1.0,
        description="Highest mean difference of sampler and trainer logprobs (sampler/logprob_difference_mean), nats",
    )
    max_repetition: Fraction | None = Field(
        None, description="Highest share of repeated 4-grams in a response (response/repetition)"
    )
    max_length_correlation: Fraction | None = Field(
        None, description="Highest correlation of scores and response lengths (response/length_correlation)"
    )
    min_distinct: Fraction | None = Field(
        None, description="Lowest share of distinct 2-grams among those of all responses (response/distinct_2)"
    )
    gold_reward: str | None = Field(
        None,
        description="Name of the reward that measures what is really wanted, usually of weight 0: its trend and that "
        "of the score are reported (gold/change, gold/score_change). Where more than reward.max_failed_fraction of an "
        "iteration lack it, the stage that scores fails",
    )
    gold_window: PositiveInt = Field(
        5,
        le=100,
        description="Iterations per window; the trend of gold_reward is the mean of a window less that of the last",
    )
    max_gold_fall: NonNegative | None = Field(
        None, description="How far the mean of gold_reward may fall between windows while the score rises"
    )
    max_skipped_steps: PositiveInt = Field(
        3,
        description="Optimizer steps in a row with a non-finite loss or gradient that end the run; fewer are skipped",
    )
    min_free_disk: NonNegative = Field(
        1.2, description="Free disk space required before an iteration, in sizes of the iteration before it; 0: off"
    )
    rollback_iterations: NonNegativeInt = Field(
        1, description="Iterations before the diverged one that a rollback discards too"
    )
    rollback_rate_factor: Fraction = Field(0.5, description="Each rollback multiplies both learning rates by this")
    max_rollbacks: PositiveInt = Field(3, description="Rollbacks per run, at most; the next divergence ends it")

    @property
    def goes_back(self) -> int:
        """How many iterations before the last one a rollback may return to."""
        return self.rollback_iterations if self.on_divergence == "rollback" else 0

    def notes(self, iterations: int, *, gold_is_all: bool) -> list[str]:
        """Two windows of the gold reward that the run is too short for, and one (`gold_is_all`) that is the score."""
        if self.max_gold_fall is not None and gold_is_all:
            return [
                f"guards.max_gold_fall={self.max_gold_fall:g} is never reached: guards.gold_reward={self.gold_reward} "
                "is the whole score and cannot fall while that rises; name a reward of weight 0"
            ]
        if self.gold_reward is None or 2 * self.gold_window <= iterations:
            return []
        return [
            f"guards.gold_window={self.gold_window} compares iterations with as many before, {2 * self.gold_window} in "
            f"all, and iterations={iterations}: gold/change is never measured; lower it, or raise iterations"
        ]

    @model_validator(mode="after")
    def _has_a_gold_reward(self) -> Self:
        if self.gold_reward is None and self.max_gold_fall is not None:
            raise ValueError(
                f"max_gold_fall={self.max_gold_fall:g} has no effect without gold_reward: set gold_reward to the name "
                "of a reward, or leave max_gold_fall out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_written_has_an_effect(self, info: ValidationInfo) -> Self:
        if not info.context:
            return self  # of a run's record, which may be older than this rule
        if not self.rollback_rate_factor:
            raise ValueError(
                "rollback_rate_factor=0 would leave learning rates of 0 for the rest of the run: set it above 0 (0.5), "
                "or on_divergence to stop"
            )
        if self.gold_reward is None:
            refuse_idle(self, "gold_window", beside="gold_reward=none", remedy="set gold_reward to a reward's name")
        if self.on_divergence != "rollback":
            names = ("rollback_iterations", "rollback_rate_factor", "max_rollbacks")
            beside = f"on_divergence={self.on_divergence}"
            refuse_idle(self, *names, beside=beside, remedy="set on_divergence to rollback")
        return self

    def problems(self, *, clips: bool, moves: bool, compares_samplers: bool) -> list[str]:
        """Limits on what is not measured: clipped ratios; what sampler and trainer differ by.

        The latter has a limit by default, and so is refused only where another one was set.
        """
        found = []
        if self.max_clip_fraction is not None and not (clips and moves):
            what = "an algorithm that" if not clips else "update.num_ppo_epochs=1 and num_minibatches=1, which"
            found.append(
                f"guards.max_clip_fraction={self.max_clip_fraction:g} has no effect with {what} clips no ratio: leave "
                "it out, or set guards.max_kl"
            )
        default = type(self).model_fields["max_sampler_difference"].default
        if self.max_sampler_difference not in (None, default) and not compares_samplers:
            found.append(
                f"guards.max_sampler_difference={self.max_sampler_difference:g} has no effect with "
                "advantages.old_logprobs=sampler, with which the trainer computes none of its own: leave it out, or "
                "set old_logprobs to trainer"
            )
        return found
