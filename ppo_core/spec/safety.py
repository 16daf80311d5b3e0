"""The sections of a run's spec that keep it safe: what is checkpointed and kept, and what counts as gone wrong.

None of these changes what a healthy run computes, so all of them may change when a run goes on.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ppo_core.spec.section import Fraction, NonNegative, Section


class CheckpointSpec(Section):
    """What is written of an iteration's policy, critic and optimizer, and for how long it is kept."""

    every: PositiveInt = Field(
        1,
        description="Critic and optimizer state are written every so many iterations and at the end; a resume replays "
        "the updates since then, to the same bytes. The policy is written always",
    )
    keep_last: PositiveInt | None = Field(
        None, description="Keep the checkpoints of the last so many iterations; none: of all. The best is always kept"
    )
    keep_every: PositiveInt | None = Field(None, description="Besides, keep those of every so many iterations")


class GuardsSpec(Section):
    """Limits that a healthy run never meets. Without a value, a guard is off."""

    on_divergence: Literal["stop", "rollback", "warn"] = Field(
        "stop",
        description="stop: end the run and keep the evidence; rollback: go back, lower the learning rates, draw other "
        "samples; warn: say so and go on",
    )
    max_kl: PositiveFloat | None = Field(None, description="KL to the reference per response (kl/reference), nats")
    min_entropy: NonNegative | None = Field(None, description="Entropy per token (policy/entropy), nats")
    max_length_growth: PositiveFloat | None = Field(
        None, description="Mean response length over that of iteration 1: 3 means three times as long"
    )
    max_clip_fraction: Fraction | None = Field(None, description="Share of tokens whose clip binds")
    max_sampler_difference: PositiveFloat | None = Field(
        1.0, description="Mean difference of sampler's and trainer's logprobs (sampler/logprob_difference_mean), nats"
    )
    max_repetition: Fraction | None = Field(
        None, description="Share of a response's 4-grams that it has said before (response/repetition)"
    )
    gold_reward: str | None = Field(
        None,
        description="Name of a reward that tells what is really wanted, of weight 0 perhaps: how its mean and that of "
        "the score move is measured (gold/change, gold/score_change)",
    )
    gold_window: PositiveInt = Field(
        5, le=100, description="What gold_reward does: its mean over so many iterations less that over as many before"
    )
    max_gold_fall: NonNegative | None = Field(
        None, description="How far the mean of gold_reward may fall from window to window while that of the score rises"
    )
    max_skipped_steps: PositiveInt = Field(
        3,
        description="So many optimizer steps in a row without finite loss and gradient end the run; fewer are skipped",
    )
    min_free_disk: NonNegative = Field(
        1.2, description="Free space that an iteration must find, in sizes of the largest iteration before it; 0: off"
    )
    rollback_iterations: NonNegativeInt = Field(
        1, description="Iterations before the diverged one that are given up too"
    )
    rollback_rate_factor: Fraction = Field(0.5, description="Each rollback multiplies both learning rates by this")
    max_rollbacks: PositiveInt = Field(3, description="So many rollbacks of one run; the next divergence ends it")

    @model_validator(mode="after")
    def _has_a_gold_reward(self) -> Self:
        if self.gold_reward is None and self.max_gold_fall is not None:
            raise ValueError(
                f"max_gold_fall={self.max_gold_fall:g} has no effect without gold_reward: set gold_reward to the name "
                "of a reward, or leave max_gold_fall out"
            )
        return self
