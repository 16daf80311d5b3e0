"""The reward `function`: calling a user's function in the form of TRL's GRPO rewards, refusing what is no score.

    reward(prompts, completions, **columns) -> list[float | None]

Prompts that are messages come with completions that are messages.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import Any, SupportsFloat

from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.plugins import RAISED, Sources, load_function, place_of
from ppo_core.scoring.reward import RewardFailed, Sample, shorten
from ppo_core.spec.rewards import FunctionRewardSpec


class FunctionReward:
    """A user's function with its options."""

    def __init__(self, spec: FunctionRewardSpec, sources: Sources, answer_column: str) -> None:
        self.name = spec.function
        self.options = spec.options
        self.sources = sources
        self.answer_column = answer_column
        self.function = load_function(spec.function, sources)

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        """Each argument without a default must be a column, with a value in every row."""
        for column in self._required():
            for number, row in enumerate(rows, 1):
                if columns_of(row, self.answer_column).get(column) is None:
                    raise InputError(
                        f"{self.name} needs the column {column!r}, which row {number} ({shorten(row.prompt)}) lacks: "
                        "add it to the data, or give the argument a default"
                    )

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """One call for all samples."""
        columns = [columns_of(one.row, self.answer_column) for one in samples]
        names = sorted({name for row in columns for name in row})
        given = {
            **{name: [row.get(name) for row in columns] for name in names},
            **self.options,
            "prompts": [one.row.prompt for one in samples],
            "completions": [as_completion(one.row.prompt, one.response) for one in samples],
        }
        return checked_scores(self.name, self._call(given), len(samples))

    def _required(self) -> list[str]:
        parameters = inspect.signature(self.function).parameters.values()
        wanted = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        return [name for name in wanted if name not in ("prompts", "completions") and name not in self.options]

    def _call(self, given: dict[str, Any]) -> Any:
        parameters = inspect.signature(self.function).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        try:
            scores = self.function(**{key: value for key, value in given.items() if open_ended or key in parameters})
            return asyncio.run(_awaited(scores)) if inspect.isawaitable(scores) else scores
        except RAISED as error:
            raise RewardFailed(
                f"the reward function {self.name} raised {type(error).__name__}: {error}{place_of(error, self.sources)}"
            ) from error


async def _awaited(value: Any) -> Any:
    return await value


def columns_of(row: PromptRow, answer_column: str) -> dict[str, Any]:
    """What a reward function sees of a row besides the prompt: metadata, and the answer under its own column name."""
    return {**row.metadata, answer_column: row.reference_answer}


def as_completion(prompt: Any, text: str) -> Any:
    """Text for text prompts; for chats one assistant message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def checked_scores(name: str, scores: Any, expected: int) -> list[float | None]:
    """The returned scores as floats or None. Raises InputError for a wrong type, length or value, naming the row."""
    try:
        values = list(scores)
    except TypeError:
        raise InputError(f"{name} returned {type(scores).__name__}, not a list of {expected} scores") from None
    if len(values) != expected:
        raise InputError(
            f"{name} returned {len(values)} scores for {expected} completions: return one (or None) for each"
        )
    checked: list[float | None] = []
    for index, value in enumerate(values):
        if value is None:
            checked.append(None)
            continue
        try:
            # Numbers of numpy and torch count as well; text that looks like a number does not.
            number = float(value) if isinstance(value, SupportsFloat) else None
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            number = None
        if number is None:
            raise InputError(f"{name}: score {index} is {value!r} ({type(value).__name__}): return a float, or None")
        if not math.isfinite(number):
            raise InputError(
                f"{name}: score {index} is {number}: return a finite number, or None where there is no score"
            )
        checked.append(number)
    return checked
