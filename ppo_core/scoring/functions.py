"""Calling a user's reward functions, in the form of TRL's GRPO rewards, and refusing what cannot be a score.

    reward(prompts, completions, **columns) -> list[float | None]

Prompts that are messages come with completions that are messages. None means "cannot be scored", and is never taken
for 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from ppo_core.records import InputError, PromptRow, ScoreRow
from ppo_core.scoring.plugins import RAISED, Sources, load_function, place_of


class RewardFailed(RuntimeError):
    """The reward function raised: perhaps a passing trouble of something it calls, so the stage may be tried again."""


class RewardFunctions:
    """The functions of a spec's `reward` section with their weights."""

    def __init__(self, weights: Mapping[str, float], options: Mapping[str, Any], sources: Sources) -> None:
        self.weights = dict(weights)
        self.options = dict(options)
        self.sources = sources
        self.functions = {name: load_function(name, sources) for name in weights}

    def check_columns(self, rows: Sequence[PromptRow], answer_column: str) -> None:
        """Raise InputError where a function's required argument is no column, or a row has no value for it."""
        for name, function in self.functions.items():
            for column in self._required(function):
                for number, row in enumerate(rows, 1):
                    if columns_of(row, answer_column).get(column) is None:
                        raise InputError(
                            f"{name} needs the column {column!r}, which row {number} ({shorten(row.prompt)}) lacks: "
                            "add it to the data, or give the argument a default"
                        )

    def score(
        self, rows: Sequence[PromptRow], responses: Sequence[str], answer_column: str
    ) -> list[dict[str, float | None]]:
        """One mapping component name -> score (or None) per response."""
        prompts = [row.prompt for row in rows]
        completions = [as_completion(row.prompt, text) for row, text in zip(rows, responses, strict=True)]
        columns = [columns_of(row, answer_column) for row in rows]
        names = sorted({name for row in columns for name in row})
        table = {name: [row.get(name) for row in columns] for name in names}
        scored = {
            component_name(name): checked_scores(
                name, self._call(name, function, prompts, completions, table), len(rows)
            )
            for name, function in self.functions.items()
        }
        return [{name: values[index] for name, values in scored.items()} for index in range(len(rows))]

    def total(self, components: Mapping[str, float | None]) -> float | None:
        """Weighted sum; None when any component could not be scored."""
        terms = [(weight, components[component_name(name)]) for name, weight in self.weights.items()]
        if any(value is None for _, value in terms):
            return None
        return float(sum(weight * value for weight, value in terms if value is not None))

    def _required(self, function: Callable[..., Any]) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        wanted = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        return [name for name in wanted if name not in ("prompts", "completions") and name not in self.options]

    def _call(
        self, name: str, function: Callable[..., Any], prompts: list[Any], completions: list[Any], table: Any
    ) -> Any:
        parameters = inspect.signature(function).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {**table, **self.options, "prompts": prompts, "completions": completions}
        try:
            scores = function(**{key: value for key, value in given.items() if open_ended or key in parameters})
            return asyncio.run(_awaited(scores)) if inspect.isawaitable(scores) else scores
        except RAISED as error:
            place = place_of(error, self.sources)
            raise RewardFailed(f"the reward function {name} raised {type(error).__name__}: {error}{place}") from error


async def _awaited(value: Any) -> Any:
    return await value


def component_name(name: str) -> str:
    """Column of a reward function: its own name, `rewards.py:correct` -> `correct`."""
    return name.rpartition(":")[2]


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


def score_rows(
    functions: RewardFunctions, rows: Sequence[PromptRow], responses: Sequence[Any], answer_column: str
) -> list[ScoreRow]:
    """Scores of rollouts (`responses`: RolloutRow), row for row; None is kept and named in `error`."""
    components = functions.score(rows, [response.response for response in responses], answer_column)
    scored = []
    for response, parts in zip(responses, components, strict=True):
        missing = [name for name, value in parts.items() if value is None]
        scored.append(
            ScoreRow(
                prompt_id=response.prompt_id,
                sample_index=response.sample_index,
                score=functions.total(parts),
                components=parts,
                truncated=not response.finished,
                error=f"not scored by {', '.join(missing)}" if missing else None,
            )
        )
    return scored


def shorten(prompt: Any, limit: int = 60) -> str:
    """A prompt as an error message shows it."""
    text = repr(prompt)
    return text if len(text) <= limit else text[: limit - 3] + "..."
