"""What may be a score: one number for a sample or, in parts, several, and the tokens that those are credited at.

    [{"start": 0, "end": 12, "score": 0.5}, ...]    parts for characters of the response's text (Python's: code points)
    [0.0, 0.0, 0.5, ...]                            one number for each of the response's tokens

A part is credited at the last token that it is for, as process rewards are at the end of a step: Lightman et al. 2023
(arXiv:2305.20050), Wang et al. 2024, Math-Shepherd (arXiv:2312.08935). Parts may overlap, and leave gaps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import takewhile
from typing import Any, SupportsFloat

from ppo_core.records import InputError, RolloutRow
from ppo_core.scoring.reward import NotScored, Sample, Score, Span, SpanScores, shorten, written

Decode = Callable[[list[int]], str]
"""The text of tokens, as it is the response's text of all of them."""
KEYS = {"start", "end", "score"}
FORM = (
    'a list of spans, as {"start": 0, "end": 12, "score": 0.5} in characters of the response, or a list of one number '
    "for each of its tokens"
)


class NotFinite(InputError):
    """A score with NaN or infinity in it; `what` is the message without whose it is."""

    def __init__(self, whose: str, what: str) -> None:
        super().__init__(f"{whose} {what}")
        self.what = what


def number_of(value: Any) -> float | None:
    """A number of Python, numpy or torch as a float; None for anything else, also for text that looks like one."""
    try:
        return float(value) if isinstance(value, SupportsFloat) and not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def checked_scores(
    name: str, scores: Any, samples: Sequence[Sample], *, one_by_one: bool = False, others: bool = False
) -> list[Score]:
    """The scores as floats, in parts or None. Raises InputError for a wrong type, length or value, naming the row.

    Of scores that were made `one_by_one`, those that are not finite are NotScored, unless none is finite; with
    `others`, that were scored before, also then.
    """
    expected = len(samples)
    try:
        values = None if isinstance(scores, str | bytes | Mapping | Set) else list(scores)
    except TypeError:
        values = None
    if values is None:
        raise InputError(
            f"{name} returned {type(scores).__name__}, not a list of {expected} scores: return a list with one (or "
            "None) for each completion, in their order"
        )
    if len(values) != expected:
        raise InputError(
            f"{name} returned {len(values)} scores for {expected} completions: return one (or None) for each"
        )
    checked, broken = list[Score](), list[NotFinite]()
    for index, (value, sample) in enumerate(zip(values, samples, strict=True)):
        try:
            checked.append(_checked(f"{name}: score {index}", value, sample))
        except NotFinite as error:
            broken.append(error)
            checked.append(NotScored(f"its score {error.what}"))
    if broken and not (one_by_one and (others or len(broken) < expected)):
        raise InputError(str(broken[0])) from broken[0]
    return checked


def _checked(whose: str, value: Any, sample: Sample) -> Score:
    if value is None or isinstance(value, NotScored):
        return value
    number = number_of(value)
    if number is None:
        parts = span_scores(whose, value, sample)
        if parts is None:
            raise InputError(
                f"{whose} is {written(value)} ({type(value).__name__}): return a float, or None, or {FORM}"
            )
        return parts
    if not math.isfinite(number):
        raise NotFinite(whose, f"is {number}: return a finite number, or None where there is no score")
    return number


def span_scores(whose: str, value: Any, sample: Sample) -> SpanScores | None:
    """A score in parts; None for what is no list. Raises InputError for a list that is none, and parts that cannot be.

    `whose` begins the message.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | Set):
        return None
    parts = list(value)
    if not parts:
        raise InputError(f"{whose} is an empty list: return 0.0 where nothing is earned, None where there is no score")
    if all(isinstance(part, Mapping) for part in parts):
        spans = tuple(_span(whose, part, len(sample.response)) for part in parts)
        return _finite(whose, SpanScores(spans))
    numbers = [number_of(part) for part in parts]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise InputError(f"{whose} is {shorten(value)} ({type(value).__name__}): return a float, or None, or {FORM}")
    if isinstance(value, tuple):
        raise InputError(
            f"{whose} is {shorten(value)}, a tuple, which may be a score with something beside it: return the score "
            f"alone, or {FORM}"
        )
    if sample.token_ids is not None and len(known) != len(sample.token_ids):
        raise InputError(
            f"{whose} has {len(known)} numbers, for a response of {len(sample.token_ids)} tokens: return one for each, "
            "with the one that ended it (the argument completion_ids has them), or spans of characters"
        )
    return _finite(whose, SpanScores(tuple(Span(at, at + 1, one) for at, one in enumerate(known)), of_tokens=True))


def tokens_of(scores: SpanScores, rollout: RolloutRow, decode: Decode) -> list[int]:
    """The token, from 0, at which each span's score is credited: the one that completes its last character.

    Raises InputError where the tokens are not those of the text.
    """
    if scores.of_tokens:
        return [span.end - 1 for span in scores.spans]
    ids, text = rollout.response_token_ids, rollout.response
    if (found := decode(ids)) != text:
        raise InputError(
            f"the response {shorten(text)} to prompt {rollout.prompt_id} was sampled with another tokenizer: its "
            f"tokens are {shorten(found)} by model.tokenizer, which has to be the one that the run began with"
        )
    done = complete_characters(ids, text, decode)
    return [min(bisect_left(done, span.end), len(ids) - 1) for span in scores.spans]


def complete_characters(token_ids: list[int], text: str, decode: Decode) -> list[int]:
    """How many characters of a text are there after each of its tokens.

    >>> complete_characters([97, 0xC3, 0xA9, 98], "aéb", lambda ids: bytes(ids).decode(errors="replace"))
    [1, 1, 2, 3]

    A character of several tokens, each some of its bytes, is there with the last of them; a token without text, as EOS,
    adds none. Few tokens are decoded at a time, from the last piece of text on: many tokenizers write the first token
    of a text in another way, and what is not complete yet as U+FFFD.
    """
    begin = read = known = 0
    before, counts = "", [0]
    for count in range(1, len(token_ids) + 1):
        new = decode(token_ids[begin:count])[len(before) :]
        counts.append(max(counts[-1], known + _agreeing(new, text[known : known + len(new)])))
        if new and text.startswith(new, known):
            begin, read, known = read, count, known + len(new)
            before = decode(token_ids[begin:read])
    return counts[1:]


def _agreeing(left: str, right: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _span(whose: str, part: Mapping[Any, Any], length: int) -> Span:
    score = number_of(part.get("score"))
    if set(part) != KEYS or score is None or not all(_is_whole(part[name]) for name in ("start", "end")):
        raise InputError(
            f"{whose} has the span {shorten(dict(part))}: give whole numbers as start and end and a number as score, "
            'as in {"start": 0, "end": 12, "score": 0.5}'
        )
    start, end = int(part["start"]), int(part["end"])
    if not 0 <= start < end <= length:
        raise InputError(
            f"{whose} has a span from {start} to {end}, in a response of {length} characters: let it begin at 0 or "
            "later, before its end, and end at the response's end at the latest"
        )
    return Span(start, end, score)


def _is_whole(value: Any) -> bool:
    number = number_of(value)
    return number is not None and number.is_integer() and not isinstance(value, bool | float)


def _finite(whose: str, scores: SpanScores) -> SpanScores:
    if not math.isfinite(scores.total):
        found = next((span.score for span in scores.spans if not math.isfinite(span.score)), scores.total)
        raise NotFinite(whose, f"has {found} in it or as its sum: return finite numbers, or None for no score")
    return scores
