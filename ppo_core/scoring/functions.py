"""The reward `function`: calling a user's function in the form it has, refusing what is no score."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import Any

from ppo_core.records import NOT_IN_A_TRIAL, InputError, PromptRow
from ppo_core.scoring.plugins import RAISED, Sources, load_function, place_of
from ppo_core.scoring.reward import NotScored, RewardFailed, Sample, Score, shorten
from ppo_core.scoring.signatures import (
    TOKENS,
    TRL,
    VERIFIERS,
    Arguments,
    batch_arguments,
    form_of,
    one_by_one_arguments,
    scores_in,
)
from ppo_core.scoring.spans import FORM, number_of, span_scores
from ppo_core.spec.reward.kinds import FunctionRewardSpec

IN_FLIGHT = 64  # calls of a coroutine function that is called for each sample


class FunctionReward:
    """A user's function with its options."""

    def __init__(self, spec: FunctionRewardSpec, sources: Sources, answer_column: str) -> None:
        self.name = spec.function
        self.options = spec.options
        self.sources = sources
        self.answer_column = answer_column
        self.function = load_function(spec.function, sources)
        parameters = inspect.signature(self.function).parameters
        self.form = form_of(list(parameters))
        self.reads_tokens = self.form is TRL and TOKENS in parameters
        self._needs_tokens = self.reads_tokens and parameters[TOKENS].default is inspect.Parameter.empty

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Each argument without a default must be a column, with a value in every row."""
        required = self._required()
        if self.form is VERIFIERS and "parser" in required:
            raise InputError(
                f"{self.name} needs the `parser` of a verifiers environment, which does not exist here: create one in "
                "its file, as in `def reward(completion, answer, parser=vf.XMLParser([...]))`"
            )
        for column in required:
            for number, row in enumerate(rows, first):
                if columns_of(row, self.answer_column).get(column) is None:
                    raise InputError(
                        f"{self.name} needs the column {column!r}, which row {number} ({shorten(row.prompt)}) lacks: "
                        "add it to the data, or give the argument a default"
                    )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One call for all samples, or for each, as the function has it."""
        sampled = all(one.token_ids is not None for one in samples)
        if self._needs_tokens and not sampled:
            return [NotScored(f"it reads {TOKENS}, and {NOT_IN_A_TRIAL}")] * len(samples)
        columns = [columns_of(one.row, self.answer_column) for one in samples]
        if self.form.one_by_one:
            given = [one_by_one_arguments(self.form, one, row) for one, row in zip(samples, columns, strict=True)]
            returned = self._run([{**row, **self.options} for row in given])
            scores: Any = [scores_in(self.form, one) for one in returned]
        else:
            given_once = batch_arguments(self.form, samples, columns)
            fixed = {name: given_once[name] for name in self.form.given}
            if self.reads_tokens and sampled:
                fixed[TOKENS] = [list(one.token_ids or ()) for one in samples]
            scores = scores_in(self.form, self._run([{**given_once, **self.options, **fixed}])[0])
        return checked_scores(self.name, scores, samples)

    def _required(self) -> list[str]:
        parameters = inspect.signature(self.function).parameters.values()
        wanted = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        given = {*self.form.given, *self.options, *((TOKENS,) if self.reads_tokens else ())}
        return [name for name in wanted if name not in given]

    def _run(self, calls: Sequence[Arguments]) -> list[Any]:
        """What each call returns; calls of a coroutine function are made side by side."""
        parameters = inspect.signature(self.function).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = [{key: value for key, value in call.items() if open_ended or key in parameters} for call in calls]
        try:
            returned = [self.function(**arguments) for arguments in given]
            return asyncio.run(_awaited(returned)) if any(map(inspect.isawaitable, returned)) else returned
        except RAISED as error:
            raise RewardFailed(
                f"the reward function {self.name} raised {type(error).__name__}: {error}{place_of(error, self.sources)}"
            ) from error


async def _awaited(values: Sequence[Any]) -> list[Any]:
    room = asyncio.Semaphore(IN_FLIGHT)

    async def wait_for(value: Any) -> Any:
        async with room:
            return await value

    return list(await asyncio.gather(*map(wait_for, values)))


def columns_of(row: PromptRow, answer_column: str) -> dict[str, Any]:
    """What a reward function sees of a row besides the prompt: metadata, and the answer under its own column name."""
    return {**row.metadata, answer_column: row.reference_answer}


def checked_scores(name: str, scores: Any, samples: Sequence[Sample]) -> list[Score]:
    """The scores as floats, in parts or None. Raises InputError for a wrong type, length or value, naming the row."""
    expected = len(samples)
    try:
        values = list(scores)
    except TypeError:
        raise InputError(f"{name} returned {type(scores).__name__}, not a list of {expected} scores") from None
    if len(values) != expected:
        raise InputError(
            f"{name} returned {len(values)} scores for {expected} completions: return one (or None) for each"
        )
    return [
        None if value is None else _checked(f"{name}: score {index}", value, sample)
        for index, (value, sample) in enumerate(zip(values, samples, strict=True))
    ]


def _checked(whose: str, value: Any, sample: Sample) -> Score:
    number = number_of(value)
    if number is None:
        parts = span_scores(whose, value, sample)
        if parts is None:
            raise InputError(f"{whose} is {value!r} ({type(value).__name__}): return a float, or None, or {FORM}")
        return parts
    if not math.isfinite(number):
        raise InputError(f"{whose} is {number}: return a finite number, or None where there is no score")
    return number
