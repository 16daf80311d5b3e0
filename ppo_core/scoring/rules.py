"""Rewards without user code: they compare a response with the reference answer, or look at its length or its form."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

from ppo_core.processes.processor_time import OutOfTime, processor_time
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.reward import TELL_EVERY_S, NotScored, Progress, Sample, Score, require_answers, shorten
from ppo_core.spec.reward.rules import (
    ExactMatchSpec,
    FormatSpec,
    JsonSchemaSpec,
    LengthSpec,
    NumberSpec,
    PatternSpec,
    RegexSpec,
)

T = TypeVar("T")

MINUS = "\u2212\u2013"  # what texts set as mathematics have for a hyphen-minus, and what others have
LATEX_COMMA = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\,|\\!)(?=\d{3}(?!\d))")
CURRENCY = "$€£¥"
SIGN = rf"(?:(?<![^\W_])[-+{MINUS}][{CURRENCY}]?)?"  # in "3-5" and "B-7" it is a hyphen
EXPONENT = rf"(?:[eE][-+{MINUS}]?\d{{1,3}})?"
NUMBER = re.compile(rf"{SIGN}(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?{EXPONENT}|{SIGN}\.\d+{EXPONENT}")

ONE_OF_EACH_TYPE: tuple[Any, ...] = (None, 0, "", [], {})


@dataclass(frozen=True)
class ExactMatch:
    """1 where the response is the reference answer, apart from white space around it."""

    spec: ExactMatchSpec
    answer_column: str

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Each row needs a reference answer that is a text or a whole number: what is written 72.0 or 1e-5 may come as
        another text."""
        require_answers(self.spec.component, rows, self.answer_column, first)
        for number, row in enumerate(rows, first):
            answer = row.reference_answer
            if isinstance(answer, bool) or not isinstance(answer, str | int):
                raise InputError(
                    f"the reward {self.spec.component} compares texts, but the {self.answer_column} of row {number} "
                    f"({shorten(answer)}) is neither a text nor a whole number: write it as the response should be, in "
                    "quotes, or use the reward number or function"
                )

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
    progress: Progress

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Each row needs a reference answer with a number in it."""
        require_answers(self.spec.component, rows, self.answer_column, first)
        for number, row in enumerate(rows, first):
            if last_number(str(row.reference_answer)) is None:
                raise InputError(
                    f"the reward {self.spec.component} compares numbers, but the {self.answer_column} of row {number} "
                    f"({shorten(row.reference_answer)}) has none: correct it, or use the reward exact_match"
                )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """A response without a number, or without a match of the pattern, is wrong."""
        return in_time(self.spec, samples, lambda one: float(self._is_right(one)), self.progress)

    def _is_right(self, sample: Sample) -> bool:
        text = selected(self.spec.pattern, sample.response)
        given, wanted = last_number(text or ""), last_number(str(sample.row.reference_answer))
        return given is not None and wanted is not None and abs(given - wanted) <= Decimal(str(self.spec.tolerance))


class Regex:
    """1 where the pattern is found in the response."""

    def __init__(self, spec: RegexSpec, progress: Progress) -> None:
        self.spec, self.progress = spec, progress
        self.pattern = re.compile(spec.pattern)

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Searched for anywhere."""

        def is_found(sample: Sample) -> float:
            return float(self.pattern.search(sample.response) is not None)

        return in_time(self.spec, samples, is_found, self.progress)


@dataclass(frozen=True)
class Length:
    """1 between the bounds, and linearly down to 0 outside of them."""

    spec: LengthSpec

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do."""

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """By the sampled tokens; in a trial, which has none, by words."""
        return [self._score(self._length(one)) for one in samples]

    def _length(self, sample: Sample) -> int:
        if self.spec.unit == "characters":
            return len(sample.response)
        return len(sample.response.split() if sample.token_ids is None else sample.token_ids)

    def _score(self, length: int) -> float:
        shortest, longest = self.spec.bounds
        off = max(shortest - length, 0 if longest is None else length - longest, 0)
        return max(1 - off / self.spec.slope, 0.0) if self.spec.slope else float(off == 0)


class Format:
    """1 where the whole response matches the pattern, and is the tags with what is between them."""

    def __init__(self, spec: FormatSpec, progress: Progress) -> None:
        self.spec, self.progress = spec, progress
        inside = rf"(?:(?!</?(?:{'|'.join(spec.tags)})>).)*"
        tags = r"\s*".join(["", *(f"<{tag}>{inside}</{tag}>" for tag in spec.tags), ""])
        forms = [spec.pattern, rf"(?s:{tags})" if spec.tags else None]
        self.forms = [re.compile(form) for form in forms if form is not None]

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """From its first character to its last."""

        def matches(sample: Sample) -> float:
            return float(all(form.fullmatch(sample.response) for form in self.forms))

        return in_time(self.spec, samples, matches, self.progress)


class JsonSchema:
    """1 where the response is JSON that the schema accepts."""

    def __init__(self, spec: JsonSchemaSpec, progress: Progress) -> None:
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry
        from referencing.exceptions import Unresolvable

        self.spec, self.progress = spec, progress
        self.beyond_it = (RecursionError, OverflowError, Unresolvable)
        # With a registry of its own a validator never looks for references on the network.
        self.validator: Any = validator_for(spec.json_schema, default=Draft202012Validator)(
            spec.json_schema, registry=Registry()
        )
        try:
            for document in ONE_OF_EACH_TYPE:
                self.validator.is_valid(document)
        except RecursionError:
            raise InputError(
                f"the reward {spec.component}: json_schema refers to itself without end, as in "
                '{"$ref": "#"}: let each $ref that comes back be below `properties` or `items`'
            ) from None

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """JSON as RFC 8259 has it: NaN and Infinity are none."""

        def fits(sample: Sample) -> Score:
            return self._score(selected(self.spec.pattern, sample.response))

        return in_time(self.spec, samples, fits, self.progress)

    def _score(self, text: str | None) -> Score:
        try:
            document = json.loads(text or "", parse_constant=_no_number)
        except (ValueError, RecursionError):
            return self.spec.no_json
        try:
            return float(self.validator.is_valid(document))
        except self.beyond_it as error:  # nested too deep, a number too large
            return NotScored(f"the reward {self.spec.component} cannot check this JSON ({type(error).__name__})")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def in_time(
    spec: PatternSpec, samples: Sequence[Sample], read: Callable[[Sample], T], progress: Progress
) -> list[T | NotScored]:
    """What is read of each sample; NotScored where that takes longer than patterns may."""
    heard, found = time.monotonic(), list[T | NotScored]()

    def one(sample: Sample) -> T | NotScored:
        try:
            with processor_time(spec.pattern_timeout_s):
                return read(sample)
        except OutOfTime:
            which = f"the pattern {spec.pattern!r}" if spec.pattern is not None else "a pattern or schema"
            return NotScored(
                f"{which} of the reward {spec.component} took more than pattern_timeout_s={spec.pattern_timeout_s:g} "
                f"(seconds of processor time) on its {len(sample.response)} characters: write it without repeats "
                "within repeats, such as (a+)+, or raise the limit"
            )

    for sample in samples:
        found.append(one(sample))
        if time.monotonic() - heard > TELL_EVERY_S:
            progress(len(found), len(samples), f"responses read by {spec.component}")
            heard = time.monotonic()
    return found


def selected(pattern: str | None, text: str) -> str | None:
    """What the last match of a pattern covers (its first group, if it has one); None without a match.

    >>> selected("#### (.*)", "#### 6, no: #### 7")
    '6, no: #### 7'
    """
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return (matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()) or ""


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly; commas between groups of three digits are left out.

    A minus may be U+2212 or U+2013, or stand before the sign of a currency; a comma may be LaTeX's. Nothing is
    computed: of 1/2, 10^6 and 1 000 it is the number at the end.

    >>> last_number("7 * 180 = 1,260.50 dollars")
    Decimal('1260.50')
    >>> last_number(r"\boxed{10,\!000}"), last_number("1{,}234"), last_number("_\u20135_")
    (Decimal('10000'), Decimal('1234'), Decimal('-5'))
    """
    found = NUMBER.findall(LATEX_COMMA.sub(",", text))
    return Decimal(re.sub(f"[{MINUS}]", "-", re.sub(f"[,{CURRENCY}]", "", found[-1]))) if found else None
