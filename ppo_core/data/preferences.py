"""From a user's rows to checked preferences: pairs, and rankings of more than two responses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from ppo_core.data.rows import PLAIN, Columns, Refusals, Rows, read_rows
from ppo_core.data.sieve import Sieve, content_key, one_form
from ppo_core.data.tallies import TOO_LONG, Tally, in_words
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, Messages
from ppo_core.spec import PreferencesSpec

ALL = Sieve(0.0, drop_repeats=False)
PAIR = ("chosen", "rejected")
SPLITS = ("train", "eval")
LARGEST_MARGIN = 1e30


class Preference(NamedTuple):
    """Responses to a prompt as texts by their columns, the best first; `where` tells people where they are from.

    `split` is `train`, or `eval` where it is held out, or "" where it is `left_out`, for that reason.
    """

    prompt: str | Messages
    responses: dict[str, str]
    margin: float
    where: str
    split: str
    left_out: str = ""

    @property
    def key(self) -> bytes:
        """By which its prompt is compared with others."""
        return content_key(self.where, one_form(self.prompt, chat=False))


class _Malformed(ValueError):
    """What is wrong with a row, without where it is."""


@dataclass(frozen=True)
class Preferences:
    """The preferences of a source. A file is read anew each time, so that only a few of its rows are in memory."""

    rows: Rows
    split: str
    sieve: Sieve

    def __iter__(self) -> Iterator[Preference]:
        """Also those that are left out; after the last, InputError for the first that is none, and how many more."""
        refusals = Refusals()
        for row in self.rows:
            with refusals:
                try:
                    responses, margin = _responses(row.content), _margin(row.content)
                except _Malformed as error:
                    raise InputError(f"{row.where} {error}") from None
                place = self.sieve.place(self.split, row, list(responses.values()))
                yield Preference(row.content["prompt"], responses, margin, row.where, *place)
        refusals.tell()


def read_preferences(
    source: str,
    sources: Sources,
    columns: Columns = PLAIN,
    split: str = "train",
    sieve: Sieve = ALL,
) -> Preferences:
    """The rows of a file, or of a `file.py:function` of the user, which is called here, once.

    They are of a split, but where the `sieve` puts them elsewhere. Iterating raises InputError naming row and column.
    """
    # The shape names the columns already, since conversations are under our names what they begin with.
    theirs = {name: vars(columns)[name] for name in ("prompt", *PAIR) if vars(columns)[name] != name}
    ours = replace(columns, prompt="prompt")
    return Preferences(read_rows(source, sources, ours, partial(_prompted, theirs)), split, sieve)


@dataclass
class Sides:
    """How many rows each prompt has, by its key, on both sides: trained on, and held out; and what became of the rows
    of each source."""

    rows: dict[str, Counter[bytes]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    tallies: list[Tally] = field(default_factory=list)

    def begin(self, source: str, split: str) -> None:
        """The next rows are of this source."""
        self.tallies.append(Tally(source, split))

    def add(self, preference: Preference) -> None:
        """One more row."""
        self.tallies[-1].note(preference.split, preference.left_out)
        if preference.split:
            self.rows[preference.split][preference.key] += 1

    def held_out_trained(self, spec: PreferencesSpec) -> int:
        """Held-out rows whose prompt is trained on. Raises InputError where all are, or where a side has no rows."""
        known, held_out = self.rows["train"], self.rows["eval"]
        for split, rows in self.rows.items():
            if not rows:
                raise InputError(self._empty(split, spec))
        count = sum(rows for key, rows in held_out.items() if key in known)
        if count == held_out.total():
            raise InputError(
                f"{spec.label_of('eval')}: all {count} held-out rows ({len(held_out)} prompts) have a prompt that is "
                f"among the {len(known)} prompts of {spec.label}: accuracy would be measured on what was learned; hold "
                "out rows with other prompts"
            )
        return count

    def _empty(self, split: str, spec: PreferencesSpec) -> str:
        """Why a side has no rows."""
        if spec.evaluation is None and not any(TOO_LONG in tally.dropped for tally in self.tallies):
            some, change = ("none", "raise") if split == "eval" else ("all", "lower")
            every = self.rows["train"] or self.rows["eval"]
            return (
                f"{spec.label}: evaluation_fraction={spec.evaluation_fraction:g} holds out {some} of its "
                f"{every.total()} rows ({len(every)} prompts): {change} it, or name held-out rows in evaluation"
            )
        told = in_words(tally for tally in self.tallies if spec.evaluation is None or tally.split == split)
        use = "to train on" if split == "train" else "to measure accuracy on"
        return f"no preferences are left {use} ({told}): see duplicates, too_long and max_tokens beside train"


def _renamed(names: Mapping[str, str], where: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row under our names. Raises InputError where it lacks one of them; a ranking needs no pair."""
    for ours, theirs in names.items():
        if theirs not in row and not (ours in PAIR and row.get("responses") is not None):
            raise InputError(
                f"{where} has no column {theirs} (its columns: {', '.join(sorted(map(str, row))) or 'none'}): name the "
                f"right one in {ours}_column"
            )
    others = {name: value for name, value in row.items() if name not in names and name not in names.values()}
    return others | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}


def _prompted(names: Mapping[str, str], where: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row; where chosen and rejected are whole conversations, with what both begin with as its prompt."""
    row = _renamed(names, where, row) if names else row
    talks = [talk for column in PAIR if isinstance(talk := row.get(column), list) and len(talk) > 1]
    if len(talks) < len(PAIR):
        if "prompt" not in row:
            raise InputError(
                f"{where} has no column prompt (its columns: {', '.join(sorted(map(str, row))) or 'none'}): add it, or "
                "name yours in prompt_column, or give chosen and rejected as conversations (lists of messages), which "
                "begin with the prompt"
            )
        return row
    (*asked, chosen), (*other, rejected) = talks
    if asked != other:
        raise InputError(
            f"{where} has chosen and rejected conversations that differ before their last message: compare answers to "
            "the same messages"
        )
    prompt = row.get("prompt")
    if prompt not in (None, asked, _content(asked[-1])):
        raise InputError(
            f"{where} has prompt={_short(prompt)}, but its conversations ask {_short(_content(asked[-1]))}: leave the "
            "prompt out"
        )
    return {**row, "prompt": asked, "chosen": [chosen], "rejected": [rejected]}


def _content(message: Any) -> Any:
    return message.get("content") if isinstance(message, Mapping) else message


def _responses(row: Mapping[str, Any]) -> dict[str, str]:
    columns = ", ".join(sorted(map(str, row)))
    # A table has all columns in each row: None is absent, unless the row has nothing else.
    present = {name for name in ("responses", *PAIR) if row.get(name) is not None}
    if "responses" in present or ("responses" in row and not set(PAIR) & set(row)):
        if set(PAIR) & present:
            raise _Malformed(f"has both responses and chosen or rejected (columns {columns}): keep one form")
        listed = row["responses"]
        if isinstance(listed, str):
            raise _Malformed(
                f"has the text responses={_short(listed)}: give a list; tables of text (CSV, TSV) can hold none, JSONL "
                "and Parquet can"
            )
        if not isinstance(listed, list) or len(listed) < 2:
            raise _Malformed(f"has responses={_short(listed)}: give a list of two or more, the best first")
        given = {f"responses[{index}]": value for index, value in enumerate(listed)}
    else:
        if missing := [column for column in PAIR if column not in row]:
            raise _Malformed(
                f"has no column {missing[0]} (its columns: {columns}): give prompt, chosen and rejected, or prompt and "
                "responses, the best first; other names of columns go into chosen_column and rejected_column"
            )
        given = {column: row[column] for column in PAIR}
    texts = {column: _text(value, column) for column, value in given.items()}
    if twins := first_equal(list(texts.values())):
        first, second = (list(texts)[index] for index in twins)
        raise _Malformed(f"has {first} == {second} ({_short(texts[first])}): neither is better; drop the row")
    return texts


def _text(value: Any, column: str) -> str:
    """A text, or the one message of a list, which is the assistant's."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        if (role := value[0].get("role")) != "assistant":
            raise _Malformed(
                f"has {column} with a last message of role {role!r}: what is compared is what the assistant answers; "
                "give it the role 'assistant', or put what the user says into the prompt"
            )
        value = value[0].get("content")
    if not isinstance(value, str):
        raise _Malformed(f"has {column}={_short(value)}: give a text, or a list of one message")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Malformed(
            f"has {column} with {value[error.start]!r} at character {error.start + 1}, a lone surrogate (half of a "
            "character): remove it"
        ) from None
    return value


def _margin(row: Mapping[str, Any]) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    number = _number(margin)
    if number is None or not 0 <= number < math.inf:
        raise _Malformed(f"has margin={_short(margin)}: give a number of 0 or more, or leave it out")
    if number > LARGEST_MARGIN:
        raise _Malformed(f"has margin={_short(margin)}: the loss is of float32, so give {LARGEST_MARGIN:g} at most")
    if row.get("responses") is not None:
        raise _Malformed("has margin and responses: a margin needs chosen and rejected; leave it out")
    return number


def _number(value: Any) -> float | None:
    """A number, also one that is written as text, as tables of text have them."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def first_equal(values: Sequence[Any]) -> tuple[int, int] | None:
    """The first two that are equal."""
    for later, value in enumerate(values):
        if (first := values.index(value)) < later:
            return first, later
    return None


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
