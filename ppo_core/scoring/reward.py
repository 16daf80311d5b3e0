"""What every kind of reward is: it says which rows it can judge, and gives each sample a score, or none.

What cannot be scored is never taken for 0: it is left out of the training, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ppo_core.records import InputError, PromptRow

Progress = Callable[[int, int, str], None]
"""Takes what is done, of how many, and a note; whoever waits hears that way that a slow reward still works."""


TELL_EVERY_S = 1.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 20.0


class RewardFailed(RuntimeError):
    """A reward raised: perhaps a passing trouble of something it calls, so the stage may be tried again."""


@dataclass(frozen=True)
class Sample:
    """A response, with the row whose prompt it answers.

    >>> Sample(PromptRow("3f1c", "7+5=", [10, 20, 8], "2", {}), "2").row.reference_answer
    '2'

    `token_ids` are those of the response, with the one that ended it; None where nothing was sampled, in a trial.
    `sample_index` tells the responses to one prompt apart.
    """

    row: PromptRow
    response: str
    token_ids: Sequence[int] | None = None
    sample_index: int = 0


@dataclass(frozen=True)
class NotScored:
    """No score, and why. `refused`: a server refused the request that the sample was in, perhaps for another one."""

    reason: str
    refused: bool = False


class Span(NamedTuple):
    """A part of a score, given for what goes from `start` to before `end`, counted from 0."""

    start: int
    end: int
    score: float


def exact_sum(numbers: Iterable[float]) -> float:
    """The sum, rounded once, and so the same in any order; not finite where a number is not, or where it is too large.

    >>> exact_sum([0.7, 0.2, 0.1]), sum([0.7, 0.2, 0.1]) < 1
    (1.0, True)
    """
    parts = list(numbers)
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):
        return float(sum(parts))


@dataclass(frozen=True)
class SpanScores:
    """A score in parts: of characters of the response's text or, `of_tokens`, of the response's tokens.

    >>> SpanScores((Span(0, 7, 0.5), Span(7, 12, 1.0))).total
    1.5
    """

    spans: tuple[Span, ...]
    of_tokens: bool = False

    @property
    def total(self) -> float:
        """The score as one number, the same in any order; not finite where a part is not, or where it is too large."""
        return exact_sum(span.score for span in self.spans)


@dataclass(frozen=True)
class MeasuredScore:
    """A score, and numbers that the reward gives beside it, by their names: measured, and counted for nothing."""

    score: float | SpanScores | None
    measures: Mapping[str, float]


Score = float | None | NotScored | SpanScores | MeasuredScore
"""None: no score, as the user's own code said."""


def plain(score: Score) -> float | NotScored | SpanScores | None:
    """The score without what was measured beside it."""
    return score.score if isinstance(score, MeasuredScore) else score


class Reward(Protocol):
    """One kind of reward, made once for a job."""

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Raise InputError where a row lacks what this reward needs, naming the row, before anything is sampled."""

    def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One score per sample. Raises RewardFailed where another try may help, InputError where none does."""


@runtime_checkable
class GoesOn(Protocol):
    """A reward that is asked in rounds: one that gave scores in earlier rounds does not fail over a few samples."""

    def go_on(self, answered: int, scored: Sample | None) -> None:
        """It gave so many scores before the next ones; `scored` is one of those samples, if one is at hand."""


def pause_after(attempt: int) -> float:
    """Seconds to wait after a try that failed, counted from 0, before the next one."""
    return min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)


def ignore_progress(done: int, total: int, note: str) -> None:
    """Nobody waits."""


def require_answers(name: str, rows: Sequence[PromptRow], answer_column: str, first: int = 1) -> None:
    """Raise InputError for the first row without a reference answer."""
    for number, row in enumerate(rows, first):
        if row.reference_answer is None:
            raise InputError(
                f"the reward {name} compares with the column {answer_column!r}, which row {number} "
                f"({shorten(row.prompt)}) lacks: add it to the data, or name another dataset.answer_column"
            )


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a prompt's message; one that only calls tools has none."""
    return str(message.get("content") or "")


def written(value: Any) -> str:
    """Its repr; of an integer with more digits than Python writes in decimal, also inside, what can be said of it."""
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, int):
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__} with an integer in it that is too large to be written"


def shorten(prompt: Any, limit: int = 60) -> str:
    """A prompt as an error message shows it."""
    text = written(prompt)
    return text if len(text) <= limit else text[: limit - 3] + "..."
