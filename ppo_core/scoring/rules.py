"""Rewards that compare a response with the reference answer, or search it for a pattern: 1 or 0, without user code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.reward import Sample, require_answers, shorten
from ppo_core.spec.reward_kinds import ExactMatchSpec, NumberSpec, RegexSpec

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+(?:[eE][-+]?\d{1,3})?")


@dataclass(frozen=True)
class ExactMatch:
    """1 where the response is the reference answer, apart from white space around it."""

    spec: ExactMatchSpec
    answer_column: str

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Each row needs a reference answer."""
        require_answers(self.spec.component, rows, self.answer_column, first)

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """Compared as text."""
        return [float(self._text(one.response) == self._text(str(one.row.reference_answer))) for one in samples]

    def _text(self, text: str) -> str:
        return text.strip().casefold() if self.spec.ignore_case else text.strip()


@dataclass(frozen=True)
class Number:
    """1 where the last number of the response is that of the reference answer, within the tolerance."""

    spec: NumberSpec
    answer_column: str

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Each row needs a reference answer with a number in it."""
        require_answers(self.spec.component, rows, self.answer_column, first)
        for number, row in enumerate(rows, first):
            if last_number(str(row.reference_answer)) is None:
                raise InputError(
                    f"the reward {self.spec.component} compares numbers, and the {self.answer_column} of row {number} "
                    f"({shorten(row.reference_answer)}) has none: correct it, or use the reward exact_match"
                )

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """A response without a number, or without a match of the pattern, is wrong."""
        return [float(self._is_right(one)) for one in samples]

    def _is_right(self, sample: Sample) -> bool:
        text = sample.response
        if self.spec.pattern is not None:
            matches = list(re.finditer(self.spec.pattern, text))
            if not matches:
                return False
            text = (matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()) or ""
        given, wanted = last_number(text), last_number(str(sample.row.reference_answer))
        return given is not None and wanted is not None and abs(given - wanted) <= Decimal(str(self.spec.tolerance))


class Regex:
    """1 where the pattern is found in the response."""

    def __init__(self, spec: RegexSpec) -> None:
        self.pattern = re.compile(spec.pattern)

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do."""

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """Searched for anywhere."""
        return [float(self.pattern.search(one.response) is not None) for one in samples]


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly; commas between groups of three digits are left out.

    >>> last_number("7 * 180 = 1,260.50 dollars")
    Decimal('1260.50')
    """
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
