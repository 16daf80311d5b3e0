"""Which algorithm trains the policy: a section per algorithm. `ppo_core/algorithms/` has what each of them does."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ppo_core.spec.section import Section
from ppo_core.spec.sections import AdvantageSpec, RolloutSpec, UpdateSpec


class PpoSpec(Section):
    """PPO with a critic of its own and GAE."""

    kind: Literal["ppo"] = Field("ppo", description="This algorithm")

    def problems(self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec) -> list[str]:
        """What in the other sections this algorithm cannot work with: nothing."""
        return []


class RlooSpec(Section):
    """REINFORCE with the leave-one-out baseline over the samples of a prompt (Ahmadian et al. 2024); no critic."""

    kind: Literal["rloo"] = Field("rloo", description="This algorithm")

    MEANINGLESS: ClassVar = {
        "advantages.gamma": "it discounts nothing: a response is one action",
        "advantages.gae_lambda": "it compares whole responses, without GAE",
        "update.critic_learning_rate": "it trains no critic",
        "update.value_clip": "it trains no critic",
    }

    def problems(self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec) -> list[str]:
        """What in the other sections this algorithm cannot work with: a setting that it would ignore, among others."""
        found = []
        if rollout.samples_per_prompt < 2:
            found.append(
                f"rollout.samples_per_prompt={rollout.samples_per_prompt} gives algorithm.kind=rloo nothing to compare "
                "a response with: set it to 2 or more (4 is usual), or algorithm.kind to ppo"
            )
        if advantages.truncated == "bootstrap":
            found.append(
                "advantages.truncated=bootstrap needs a critic, and algorithm.kind=rloo trains none: set terminal or "
                "mask"
            )
        sections: dict[str, Section] = {"advantages": advantages, "update": update}
        for key, reason in self.MEANINGLESS.items():
            section, _, name = key.partition(".")
            value, default = vars(sections[section])[name], type(sections[section]).model_fields[name].default
            if value != default:
                found.append(
                    f"{key}={value} has no meaning with algorithm.kind=rloo ({reason}): leave it out, or set "
                    "algorithm.kind to ppo"
                )
        return found


AlgorithmSpec = Annotated[PpoSpec | RlooSpec, Field(discriminator="kind")]
