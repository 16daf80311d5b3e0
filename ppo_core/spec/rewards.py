"""Who scores a response: the `reward` section, a list of rewards of several kinds, each with its weight."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ppo_core.spec.section import NonNegative, Section


class _Reward(Section):
    """What every kind has."""

    weight: float = Field(1.0, allow_inf_nan=False, description="The score is the weighted sum of all rewards")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$",
        description="What metrics and columns call it; default: the function's name, or the kind",
    )

    @property
    def component(self) -> str:
        """Its column among the scores."""
        return self.name or self.label

    @property
    def label(self) -> str:
        """What people know it by."""
        return str(vars(self)["kind"])

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of the user's functions that it calls."""
        return ()


class FunctionRewardSpec(_Reward):
    """A Python function in the form of TRL's GRPO rewards."""

    kind: Literal["function"] = Field("function", description="This kind")
    function: str = Field(description="package.module:function or path/to/file.py:function")
    options: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments")

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, name: str) -> str:
        if name.count(":") != 1 or not all(name.split(":")):
            raise ValueError(f"{name!r} names no function: write package.module:function or path/to/file.py:function")
        return name

    @property
    def component(self) -> str:
        """`rewards.py:correct` -> `correct`."""
        return self.name or self.function.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Its import path."""
        return self.function

    @property
    def code(self) -> tuple[str, ...]:
        """Itself."""
        return (self.function,)


class ExactMatchSpec(_Reward):
    """1 where the response is the reference answer, apart from white space around it; else 0."""

    kind: Literal["exact_match"] = Field("exact_match", description="This kind")
    ignore_case: bool = Field(False, description="Whether Paris and paris are the same")


class _Pattern(_Reward):
    pattern: str | None

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression ({error}): see Python's module re") from None
        return pattern


class NumberSpec(_Pattern):
    """1 where the last number of the response is that of the reference answer, else 0."""

    kind: Literal["number"] = Field("number", description="This kind")
    pattern: str | None = Field(
        None,
        description=r"Regular expression; what its last match (its first group, if it has one) covers is looked at "
        r"alone, as in '#### (.*)'. No match: 0. none: the whole response",
    )
    tolerance: NonNegative = Field(0.0, description="Largest difference of two numbers that count as equal")


class RegexSpec(_Pattern):
    """1 where the pattern is found in the response, else 0."""

    kind: Literal["regex"] = Field("regex", description="This kind")
    pattern: str = Field(min_length=1, description="Regular expression of Python's `re`, searched for anywhere")


RewardKind = Annotated[
    FunctionRewardSpec | ExactMatchSpec | NumberSpec | RegexSpec, Field(discriminator="kind", description="A reward")
]


class RewardSpec(Section):
    """Who scores a response: one Python function, several with weights, or a list of rewards of any kind."""

    function: str | dict[str, float] | None = Field(
        None,
        description="package.module:function or path/to/file.py:function; or a mapping of such names to weights",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments of every function")
    sources: tuple[RewardKind, ...] = Field(
        (), description="Rewards of kind function, exact_match, number or regex, in addition to `function`"
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
    def _named(self) -> Self:
        rewards = self.rewards
        if not rewards:
            raise ValueError(
                "no reward is named: give at least one function, for example function: rewards.py:correct, or a list "
                "of `sources`, for example [{kind: exact_match}]"
            )
        columns = [reward.component for reward in rewards]
        if len(set(columns)) < len(columns):
            raise ValueError(
                f"two rewards share a name ({', '.join(columns)}), and so a column of the scores: give one of them "
                "another `name`"
            )
        return self
