"""Who scores a response: the `reward` section, a list of rewards of several kinds, each with its weight."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, ValidationInfo, model_validator

from ppo_core.spec.reward.kinds import FunctionRewardSpec, ModelRewardSpec, Options, RewardKind
from ppo_core.spec.section import Fraction, Section

OF_THE_WHOLE_SCORE = ("mean", "std", "unscored", "positions", "ahead", "prompts_with_signal")
"""Metrics `score/NAME` of all rewards together: no single one has such a name."""


class RewardSpec(Section):
    """Who scores a response: one Python function, several with weights, or a list of rewards of any kind."""

    function: str | dict[str, float] | None = Field(
        None,
        description="Reward function, as package.module:function or path/to/file.py:function; or a mapping of several "
        "to weights",
    )
    options: Options = Field(default_factory=dict, description="Keyword arguments that every function gets")
    sources: tuple[RewardKind, ...] = Field(
        (),
        description="Rewards of kind function, exact_match, number, regex, length, format, json_schema, unit_tests, "
        "http, judge or model, besides `function`",
    )
    max_failed_fraction: Fraction = Field(
        0.5,
        description="Largest fraction of responses without a score, or without that of any one reward; above it the "
        "stage fails, an evaluation too, and two policies are not compared. Responses without a score are left out",
    )

    @property
    def rewards(self) -> tuple[RewardKind, ...]:
        """All of them, the functions of `function` first."""
        short = {self.function: 1.0} if isinstance(self.function, str) else self.function or {}
        named = [FunctionRewardSpec(function=name, weight=weight) for name, weight in short.items()]
        every = [
            reward.model_copy(update={"options": {**self.options, **reward.options}})
            if isinstance(reward, FunctionRewardSpec)
            else reward
            for reward in (*named, *self.sources)
        ]
        return tuple(every)

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of all functions of the user's."""
        return tuple(dict.fromkeys(name for reward in self.rewards for name in reward.code))

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of all reward models."""
        return tuple(dict.fromkeys(name for reward in self.rewards for name in reward.folders))

    @property
    def models(self) -> tuple[ModelRewardSpec, ...]:
        """Those that are models which this machine computes."""
        return tuple(reward for reward in self.rewards if isinstance(reward, ModelRewardSpec))

    @property
    def labels(self) -> str:
        """All rewards as people know them, in one line."""
        return ", ".join(reward.label for reward in self.rewards)

    @model_validator(mode="before")
    @classmethod
    def _a_function_says_its_kind(cls, values: Any) -> Any:
        """`sources: [{function: rewards.py:correct}]` means one of kind function."""
        sources = values.get("sources") if isinstance(values, dict) else None
        if not isinstance(sources, list | tuple):
            return values
        said = [
            {"kind": "function", **source} if isinstance(source, dict) and "function" in source else source
            for source in sources
        ]
        return {**values, "sources": said}

    @model_validator(mode="after")
    def _named(self, info: ValidationInfo) -> Self:
        rewards = self.rewards
        if not rewards:
            raise ValueError(
                "no reward is named: give at least one function, for example function: rewards.py:correct, or a list "
                "of `sources`, for example [{kind: exact_match}]"
            )
        if not any(reward.weight for reward in rewards):
            raise ValueError("every reward has weight 0, so every score would be 0: give one of them another weight")
        columns = [reward.component for reward in rewards]
        if len(set(columns)) < len(columns):
            raise ValueError(
                f"two rewards have the same name ({', '.join(columns)}), which also names their columns: give one of "
                "them another `name`"
            )
        taken = next((reward for reward in rewards if reward.component in OF_THE_WHOLE_SCORE), None)
        if self.options and info.context and not any(isinstance(one, FunctionRewardSpec) for one in rewards):
            raise ValueError(
                f"options={', '.join(self.options)} is for functions, and no reward is one: leave it out, or give each "
                "reward in `sources` its own keys"
            )
        if taken is not None and info.context:  # a run's record may be older than this rule
            raise ValueError(
                f"the reward {taken.label} is called {taken.component}, but score/{taken.component} is a metric of all "
                f"rewards together, as {', '.join(OF_THE_WHOLE_SCORE)} are: give it another `name`, as in sources: "
                f"{_renamed(taken)}"
            )
        return self


def _renamed(reward: RewardKind) -> str:
    """An entry of `sources` with a name that is free."""
    what = f"function: {reward.function}" if isinstance(reward, FunctionRewardSpec) else f"kind: {reward.kind}"
    return f"[{{{what}, name: my_{reward.component}}}]"
