"""Algorithms that compare rewards with each other."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from ppo_core.spec.advantages import AdvantageSpec
from ppo_core.spec.algorithms.algorithm import Algorithm
from ppo_core.spec.sections import RolloutSpec
from ppo_core.spec.update import UpdateSpec

NO_CRITIC = dict.fromkeys(
    (
        "advantages.critic_gae_lambda",
        "update.critic_learning_rate",
        "update.critic_warmup_iterations",
        "update.value_clip",
    ),
    "it trains no critic",
)
WHOLE_RESPONSES = {
    "advantages.gamma": "it discounts nothing: a response is one action",
    "advantages.gae_lambda": "it compares whole responses, without GAE",
    "advantages.gae_lambda_alpha": "it compares whole responses, without GAE",
}


ONLY_SCALED = (
    "advantages.score_norm={norm} has no effect with algorithm.kind={kind}, whose whitening divides by the spread of "
    "the advantages: leave it out"
)


def scale_is_all(advantages: AdvantageSpec) -> bool:
    """Whether score_norm scales all that advantages are made of, so that whitening undoes it."""
    return not adds_to_scores(advantages) and not advantages.kl.coef


def adds_to_scores(advantages: AdvantageSpec) -> bool:
    """Whether something is added to scores, or cut off them, after score_norm has scaled them."""
    added = (advantages.score_clip, advantages.overlong, advantages.missing_eos_penalty or None)
    return added != (None,) * 3


class _WithoutCritic(Algorithm):
    """No critic is trained."""

    MEANINGLESS: ClassVar[dict[str, str]] = NO_CRITIC

    def std_cancels(self, advantages: AdvantageSpec) -> bool:
        """Whether a scale of all scores is divided out again."""
        return bool(advantages.whiten) and scale_is_all(advantages)

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A critic's value of what would have followed, and sums that depend on the length, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if advantages.whiten_rewards:
            found.append(
                "advantages.whiten_rewards=true adds to every token's reward, so that the sum of a response's rewards "
                f"depends on its length, and algorithm.kind={self.kind} learns from these sums: leave it out, or set "
                "algorithm.kind to ppo"
            )
        if advantages.truncated == "bootstrap":
            found.insert(
                0,
                f"advantages.truncated=bootstrap needs a critic, and algorithm.kind={self.kind} trains none: set "
                "terminal or mask",
            )
        return found


class _ComparesGroups(_WithoutCritic):
    """A response is compared with the others to the same prompt."""

    MEANINGLESS: ClassVar[dict[str, str]] = {**WHOLE_RESPONSES, **NO_CRITIC}
    COMPARES: ClassVar[bool] = True

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """Groups of one, and a mean over all prompts that is taken from what each group is worth, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if advantages.whiten and advantages.whiten_centred:
            found.append(
                f"advantages.whiten={str(advantages.whiten).lower()} subtracts a mean over all prompts, and with "
                f"algorithm.kind={self.kind} a prompt whose responses got the same score has to stay at 0: set it to "
                "false, or whiten_centred to false, which only scales"
            )
        if written and advantages.score_norm == "mean_std" and advantages.score_clip is None:
            remedy = "leave it out" if self.std_cancels(advantages) else "set it to std or none"
            found.append(
                f"advantages.score_norm=mean_std subtracts a mean that cancels with algorithm.kind={self.kind}, which "
                f"compares the responses to one prompt: {remedy}"
            )
        if advantages.whiten is None and not advantages.whiten_centred:
            found.append(
                f"advantages.whiten_centred=false has no effect with algorithm.kind={self.kind}, which does not whiten "
                "by default: leave it out, or set whiten to true or minibatch"
            )
        if rollout.samples_per_prompt < 2:
            found.insert(
                0,
                f"rollout.samples_per_prompt={rollout.samples_per_prompt} gives algorithm.kind={self.kind} nothing to "
                "compare a response with: set it to 2 or more (4 is usual), or algorithm.kind to ppo",
            )
        return found


class RlooSpec(_ComparesGroups):
    """REINFORCE with the leave-one-out baseline over the samples of a prompt (Ahmadian et al. 2024); no critic."""

    kind: Literal["rloo"] = Field("rloo", description="This algorithm")

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A scale of all scores that whitening cancels, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if written and advantages.score_norm == "std" and self.std_cancels(advantages):
            found.append(ONLY_SCALED.format(norm="std", kind=self.kind) + ", or set advantages.whiten to false")
        return found


class GrpoSpec(_ComparesGroups):
    """Rewards relative to the group of samples of a prompt (Shao et al. 2024, DeepSeekMath); no critic."""

    kind: Literal["grpo"] = Field("grpo", description="This algorithm")
    scale: Literal["std", "none"] = Field(
        "std", description="std: divide by the group's standard deviation; none: do not (Dr. GRPO)"
    )

    def std_cancels(self, advantages: AdvantageSpec) -> bool:
        """By the group's own deviation too, of which the KL penalty has no part."""
        return super().std_cancels(advantages) or (self.scale == "std" and not adds_to_scores(advantages))

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A scale of all scores that the group's own cancels, where nothing is added to them, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        if written and self.scale == advantages.score_norm == "std" and not adds_to_scores(advantages):
            found.append(
                "advantages.score_norm=std has no effect with algorithm.kind=grpo, whose scale=std divides by the "
                "group's own deviation: leave it out, or set algorithm.scale to none"
            )
        return found


class ReinforceSpec(_WithoutCritic):
    """REINFORCE with the reward to go; with centred whitening (the default) REINFORCE++ (Hu 2025); no critic."""

    kind: Literal["reinforce"] = Field("reinforce", description="This algorithm")
    baseline: Literal["batch_mean", "none"] = Field(
        "batch_mean", description="Subtracted from every reward to go; centred whitening (advantages.whiten) cancels it"
    )

    @field_validator("baseline", mode="before")
    @classmethod
    def _leave_one_out_is_rloo(cls, baseline: Any) -> Any:
        if baseline == "leave_one_out":
            raise ValueError(
                f"{baseline} is an algorithm of its own here: set algorithm.kind to rloo, and "
                "rollout.samples_per_prompt to 2 or more"
            )
        return baseline

    MEANINGLESS: ClassVar[dict[str, str]] = {
        "advantages.gae_lambda": "it has no values to mix in",
        "advantages.gae_lambda_alpha": "it has no values to mix in",
        **NO_CRITIC,
    }

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """A baseline that whitening cancels, besides."""
        found = super().problems(rollout, advantages, update, written=written)
        centred = advantages.whiten is not False and advantages.whiten_centred
        norm, shift_cancels = advantages.score_norm, advantages.gamma == 1 and (centred or self.baseline != "none")
        cancels = norm == "std" or (norm == "mean_std" and shift_cancels)
        if written and centred and cancels and scale_is_all(advantages):
            off = ", or set advantages.whiten to false" if norm == "std" else ""
            found.append(ONLY_SCALED.format(norm=norm, kind=self.kind) + off)
        elif written and norm == "mean_std" and advantages.score_clip is None and shift_cancels:
            found.append(
                "advantages.score_norm=mean_std subtracts a mean that cancels with algorithm.kind=reinforce, which "
                "subtracts that of the batch: set it to std or none"
            )
        if self.baseline == "none" and centred:
            found.append(
                "algorithm.baseline=none has no effect with centred whitening, which subtracts a mean anyway: leave it "
                "out, or set advantages.whiten or whiten_centred to false"
            )
        return found
