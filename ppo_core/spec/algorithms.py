"""Which algorithm trains the policy: a section per algorithm. `ppo_core/algorithms/` has what each of them does."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ppo_core.spec.advantages import AdvantageSpec
from ppo_core.spec.section import Section
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


class PpoSpec(Section):
    """PPO with a critic of its own and GAE."""

    kind: Literal["ppo"] = Field("ppo", description="This algorithm")

    def problems(self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec) -> list[str]:
        """What in the other sections this algorithm cannot work with: nothing."""
        return []


class _WithoutCritic(Section):
    """`MEANINGLESS` are the settings of other sections that an algorithm would ignore, each with the reason."""

    kind: str = Field(description="The algorithm")
    MEANINGLESS: ClassVar[dict[str, str]] = NO_CRITIC

    def problems(self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec) -> list[str]:
        """What in the other sections this algorithm cannot work with: a setting that it would ignore, among others."""
        found = []
        if advantages.truncated == "bootstrap":
            found.append(
                f"advantages.truncated=bootstrap needs a critic, and algorithm.kind={self.kind} trains none: set "
                "terminal or mask"
            )
        sections: dict[str, Section] = {"advantages": advantages, "update": update}
        for key, reason in self.MEANINGLESS.items():
            section, _, name = key.partition(".")
            value, default = vars(sections[section])[name], type(sections[section]).model_fields[name].default
            if value != default:
                found.append(
                    f"{key}={value} has no meaning with algorithm.kind={self.kind} ({reason}): leave it out, or set "
                    "algorithm.kind to ppo"
                )
        return found


class _ComparesGroups(_WithoutCritic):
    """A response is compared with the others to the same prompt."""

    MEANINGLESS: ClassVar[dict[str, str]] = {**WHOLE_RESPONSES, **NO_CRITIC}

    def problems(self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec) -> list[str]:
        """Groups of one, besides."""
        found = super().problems(rollout, advantages, update)
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


class GrpoSpec(_ComparesGroups):
    """Rewards relative to the group of samples of a prompt (Shao et al. 2024, DeepSeekMath); no critic."""

    kind: Literal["grpo"] = Field("grpo", description="This algorithm")
    scale: Literal["std", "none"] = Field(
        "std", description="Divide by the group's standard deviation, or not (Dr. GRPO)"
    )


class ReinforceSpec(_WithoutCritic):
    """REINFORCE with the reward to go; with advantages.whiten REINFORCE++ (Hu 2025); no critic."""

    kind: Literal["reinforce"] = Field("reinforce", description="This algorithm")
    baseline: Literal["batch_mean", "none"] = Field(
        "batch_mean", description="Subtracted from every reward to go; cancels with advantages.whiten"
    )

    MEANINGLESS: ClassVar[dict[str, str]] = {
        "advantages.gae_lambda": "it has no values to mix in",
        "advantages.gae_lambda_alpha": "it has no values to mix in",
        **NO_CRITIC,
    }


AlgorithmSpec = Annotated[PpoSpec | RlooSpec | GrpoSpec | ReinforceSpec, Field(discriminator="kind")]
