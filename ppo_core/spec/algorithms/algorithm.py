"""What the section of every algorithm says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field

from ppo_core.spec.advantages import AdvantageSpec
from ppo_core.spec.section import Section
from ppo_core.spec.sections import RolloutSpec
from ppo_core.spec.update import UpdateSpec


class Algorithm(Section):
    """`MEANINGLESS` are the settings of other sections that an algorithm would ignore, each with the reason.

    `COMPARES`: whether it learns from a response only what sets it apart from others to the same prompt. `ALPHA`: its
    own advantages.gae_lambda_alpha, where the spec has none.
    """

    kind: str = Field(description="The algorithm")
    MEANINGLESS: ClassVar[dict[str, str]] = {}
    COMPARES: ClassVar[bool] = False
    ALPHA: ClassVar[float | None] = None

    @property
    def learns_values(self) -> bool:
        """Whether values are trained, by a critic or a head on the policy."""
        return "update.value_clip" not in self.MEANINGLESS

    def continued(self, carried: Mapping[str, float]) -> Self:
        """The algorithm as the next iteration has it, after one whose update left these values of its settings."""
        return self.model_copy(update=dict(carried))

    def problems(
        self, rollout: RolloutSpec, advantages: AdvantageSpec, update: UpdateSpec, *, written: bool
    ) -> list[str]:
        """What in the other sections this algorithm cannot work with: a setting that it would ignore, among others.

        `written`: whether a person wrote the spec; a run's record has the defaults written out too.
        """
        sections: dict[str, Section] = {"advantages": advantages, "update": update}
        found = []
        for key, reason in self.MEANINGLESS.items():
            section, _, name = key.partition(".")
            value, default = vars(sections[section])[name], type(sections[section]).model_fields[name].default
            if value != default:
                found.append(
                    f"{key}={value} has no effect with algorithm.kind={self.kind} ({reason}): leave it out, or set "
                    "algorithm.kind to ppo"
                )
        if rollout.dynamic_sampling is not None and not self.COMPARES:
            found.append(
                "rollout.dynamic_sampling drops prompts whose responses all have the same score, but algorithm.kind="
                f"{self.kind} learns from these too: leave it out, or set algorithm.kind to rloo or grpo"
            )
        return found

    def notes(self, update: UpdateSpec) -> list[str]:
        """What a person should know before the run starts."""
        return []
