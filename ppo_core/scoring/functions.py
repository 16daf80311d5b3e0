"""The reward `function`: calling a user's function in the form it has, refusing what is no score."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ppo_core.processes.plugins import RAISED, Sources, load_function, place_of
from ppo_core.records import NOT_IN_A_TRIAL, InputError, PromptRow
from ppo_core.scoring.reward import (
    TELL_EVERY_S,
    MeasuredScore,
    NotScored,
    Progress,
    RewardFailed,
    Sample,
    Score,
    ignore_progress,
    pause_after,
    shorten,
)
from ppo_core.scoring.signatures import (
    TOKENS,
    TRL,
    VERIFIERS,
    Arguments,
    batch_arguments,
    form_of,
    measures_in,
    one_by_one_arguments,
    own,
    scores_in,
    takes,
)
from ppo_core.scoring.spans import checked_scores
from ppo_core.spec.reward.kinds import FunctionRewardSpec

IN_FLIGHT = 64  # calls of a coroutine function that is called for each sample
LONGEST_MESSAGE = 2000

LASTING = (
    *(TypeError, AttributeError, NameError, ImportError, SyntaxError, AssertionError),
    *(ArithmeticError, NotImplementedError, RecursionError, SystemExit),
)
"""What code raises that would raise it again for the same sample. Others may be of what it asks."""


class _Raised(NamedTuple):
    """In place of what a call would have returned."""

    error: BaseException


class FunctionReward:
    """A user's function with its options."""

    def __init__(
        self, spec: FunctionRewardSpec, sources: Sources, answer_column: str, progress: Progress = ignore_progress
    ) -> None:
        self.name = spec.function
        self.progress = progress
        self.answered = 0
        self.options = spec.options
        self.sources = sources
        self.answer_column = answer_column
        self.timeout_s, self.retries = spec.timeout_s, spec.retries
        self.function = load_function(spec.function, sources)
        if self.timeout_s is not None and not inspect.iscoroutinefunction(self.function):
            raise InputError(
                f"timeout_s={self.timeout_s:g} of the reward function {self.name} has no effect: it is no coroutine "
                "function, which could be ended; write it with `async def`, or leave timeout_s out"
            )
        parameters = self.parameters = inspect.signature(self.function).parameters
        self.form = form_of(parameters)
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
        needed = [(name, name) for name in required]
        if self.form.answer in self._arguments():
            needed.append((self.answer_column, self.form.answer))
        for column, argument in needed:
            for number, row in enumerate(rows, first):
                if columns_of(row, self.answer_column).get(column) is None:
                    what = "" if argument == column else f" as its {argument}"
                    remedy = "" if argument == column else ", name another dataset.answer_column"
                    if self.form is TRL and argument in VERIFIERS.optional:
                        remedy = ", add the parameter `completion` if it is written for verifiers"
                    raise InputError(
                        f"{self.name} needs the column {column!r}{what}, which row {number} ({shorten(row.prompt)}) "
                        f"lacks: add it to the data{remedy}, or give the argument a default"
                    )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One call for all samples, or for each, as the function has it."""
        sampled = all(one.token_ids is not None for one in samples)
        if self._needs_tokens and not sampled:
            return [NotScored(f"it reads {TOKENS}, and {NOT_IN_A_TRIAL}")] * len(samples)
        columns = [columns_of(one.row, self.answer_column) for one in samples]
        if self.form.one_by_one:
            returned: Any = self._run_each(len(samples), lambda at: self._each(samples[at], columns[at]))
            scores: Any = [scores_in(self.name, self.form, one) for one in returned]
        else:
            given_once = batch_arguments(self.form, samples, columns)
            fixed = {name: given_once[name] for name in self.form.given}
            if self.reads_tokens and sampled:
                fixed[TOKENS] = [list(one.token_ids or ()) for one in samples]
            call = {**given_once, **own(self.options), **fixed}
            returned = self._run(self._with_values(call, lambda values: all(one is None for one in values)))
            scores = scores_in(self.name, self.form, returned)
        checked = checked_scores(self.name, scores, samples, one_by_one=self.form.one_by_one, others=self.answered > 0)
        return with_measures(checked, measures_in(self.name, self.form, returned, len(samples)))

    def go_on(self, answered: int, scored: Sample | None) -> None:
        """Where it gave scores before, samples on which it raises have no score, also if these are all of a round."""
        self.answered = answered

    def check_retries(self) -> None:
        """Raise InputError where retries are asked for that there are none of."""
        if not self.form.one_by_one and self.retries not in (0, FunctionRewardSpec.model_fields["retries"].default):
            raise InputError(
                f"retries={self.retries} of the reward function {self.name} has no effect: it is called once for all "
                "samples, and what it raises fails the stage; write it for one sample, or leave retries out"
            )

    def _arguments(self) -> list[str]:
        """Those without a default."""
        return [name for name in takes(self.parameters) if self.parameters[name].default is inspect.Parameter.empty]

    def _required(self) -> list[str]:
        given = {*self.form.given, *self.options, *((TOKENS,) if self.reads_tokens else ())}
        return [name for name in self._arguments() if name not in given]

    def _each(self, sample: Sample, columns: Arguments) -> Arguments:
        """The arguments of a call for one sample, made anew for each try."""
        row = self._with_values(one_by_one_arguments(self.form, sample, columns), lambda value: value is None)
        return {**row, **own(self.options)}

    def _with_values(self, call: Arguments, is_missing: Callable[[Any], bool]) -> Arguments:
        """Without arguments for which the data have no value and the function a default."""
        defaults = set(takes(self.parameters)) - {*self._arguments(), *self.options}
        return {name: value for name, value in call.items() if name not in defaults or not is_missing(value)}

    def _run(self, call: Arguments) -> Any:
        """What one call for all samples returns."""
        try:
            returned = self.function(**self._taken(call))
            return _listed(_runner().run(_one(returned, self.timeout_s)) if inspect.isawaitable(returned) else returned)
        except RAISED as error:
            raise self._failed(error) from error

    def _run_each(self, count: int, arguments: Callable[[int], Arguments]) -> list[Any]:
        """What each call returns, NotScored for one that raises also when it is made again, after all the others.

        `arguments` makes those of a call by its number. Raises RewardFailed (InputError for an error of the code) where
        all raise, and none was answered before.
        """
        heard, done, tries = time.monotonic(), 0, [1] * count

        def ended(returned: Any) -> Any:
            nonlocal heard, done
            done += 1
            if time.monotonic() - heard > TELL_EVERY_S:
                self.progress(done, count, f"responses scored by {self.name}")
                heard = time.monotonic()
            return returned

        returned = self._round(map(arguments, range(count)), ended)
        for attempt in range(self.retries):
            again = [number for number, found in enumerate(returned) if _may_pass(found)]
            if not again:
                break
            done -= len(again)
            self.progress(done, count, f"{self.name} raised for {len(again)} responses, which it is asked again")
            time.sleep(pause_after(attempt))
            for number, found in zip(again, self._round(map(arguments, again), ended), strict=True):
                returned[number], tries[number] = found, tries[number] + 1
        raised = {number: found.error for number, found in enumerate(returned) if isinstance(found, _Raised)}
        if raised and len(raised) == count and not self.answered:
            first = next((number for number, error in raised.items() if not isinstance(error, LASTING)), 0)
            raise self._failed(raised[first], tries[first]) from raised[first]
        for number, error in raised.items():
            returned[number] = NotScored(str(self._failed(error, tries[number])))
        return returned

    def _round(self, calls: Iterator[Arguments], ended: Callable[[Any], Any]) -> list[Any]:
        """What each call returns or, as _Raised, raises; calls of a coroutine function are made side by side."""
        returned = list[Any]()
        for call in calls:
            try:
                found = _listed(self.function(**self._taken(call)))
            except RAISED as error:
                found = _Raised(error)
            returned.append(found if inspect.isawaitable(found) else ended(found))
        if any(map(inspect.isawaitable, returned)):
            returned = _runner().run(_awaited(returned, self.timeout_s, ended))
        return returned

    def _taken(self, call: Arguments) -> Arguments:
        """What of the arguments the function takes."""
        open_ended = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return {key: value for key, value in call.items() if open_ended or key in self.parameters}

    def _failed(self, error: BaseException, tries: int = 1) -> RewardFailed | InputError:
        """As its kind has it: what would be raised again is not tried again."""
        place, often = place_of(error, self.sources), f" (after {tries} tries)" if tries > 1 else ""
        message = f"the reward function {self.name} raised {type(error).__name__}: {_said(error)}{place}{often}"
        return InputError(message) if isinstance(error, LASTING) else RewardFailed(message)


def _said(error: BaseException) -> str:
    """Its message, as it can be stored: it may quote anything."""
    try:
        said = str(error)
    except RAISED:
        said = "a message that cannot be made"
    shown = said if len(said) <= LONGEST_MESSAGE else f"{said[:LONGEST_MESSAGE]} …"
    return shown.encode(errors="backslashreplace").decode()


def _may_pass(found: Any) -> bool:
    """Whether a call raised what it may not raise when it is made again."""
    return isinstance(found, _Raised) and not isinstance(found.error, LASTING)


@functools.cache
def _runner() -> asyncio.Runner:
    """The one event loop of this process: what a user's module makes once, such as a session or a semaphore, is of the
    loop that it was first used in, and raises in another."""
    return asyncio.Runner()


async def _one(value: Any, timeout_s: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            returned = await value
    except TimeoutError:
        if not limit.expired():
            raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("a task that it awaits was cancelled") from error
    if limit.expired():  # also where it went on and returned something
        raise TimeoutError(f"no score within timeout_s={timeout_s:g}")
    return returned


def _listed(returned: Any) -> Any:
    """What a function that yields gives, here, where what it raises is told as its own."""
    yields = isinstance(returned, Iterator) and not inspect.isawaitable(returned)
    return list(returned) if yields else returned


async def _awaited(
    values: Sequence[Any],
    timeout_s: float | None,
    ended: Callable[[Any], Any],
) -> list[Any]:
    """Those that are awaitable awaited, `IN_FLIGHT` at a time; the others as they are."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def wait_for(value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        async with room:
            try:
                return ended(_listed(await _one(value, timeout_s)))
            except RAISED as error:
                return ended(_Raised(error))

    return list(await asyncio.gather(*map(wait_for, values)))


def with_measures(scores: list[Score], measures: Sequence[dict[str, float]]) -> list[Score]:
    """Each score with what was given beside it; `measures` is empty where there is nothing."""

    def measured(score: Score, beside: dict[str, float]) -> Score:
        return MeasuredScore(score, beside) if beside and not isinstance(score, NotScored | MeasuredScore) else score

    return [measured(*one) for one in zip(scores, measures, strict=True)] if measures else scores


def columns_of(row: PromptRow, answer_column: str) -> dict[str, Any]:
    """What a reward function sees of a row besides the prompt: metadata, and the answer under its own column name."""
    return {**row.metadata, answer_column: row.reference_answer}
