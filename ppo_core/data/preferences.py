"""From a user's rows to checked, tokenized preferences: pairs, and rankings of more than two responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.data.rows import PLAIN, Columns, Refusals, read_rows
from ppo_core.data.sieve import content_key, one_form
from ppo_core.data.tables import TOKENS
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, Messages, TokenSequence
from ppo_core.spec import PreferencesSpec

RANKINGS = pa.schema([("responses", pa.list_(TOKENS)), ("margin", pa.float64()), ("prompt_tokens", pa.int32())])
PAIR = ("chosen", "rejected")


class Preference(NamedTuple):
    """Responses to a prompt as texts by their columns, the best first; `where` tells people where they are from."""

    prompt: str | Messages
    responses: dict[str, str]
    margin: float
    where: str


class Ranking(NamedTuple):
    """The same as token ids, each a prompt with a response.

    `prompt_tokens` of each are the prompt's; a reward model reads both as one, and does not ask.

    >>> Ranking([[5, 6, 7], [5, 6, 8]], 0.0, prompt_tokens=2).answers()[1]
    TokenSequence(prompt_ids=[5, 6], response_ids=[8])
    """

    responses: list[list[int]]
    margin: float
    prompt_tokens: int = 0

    @property
    def size(self) -> int:
        """Tokens of all responses, the prompt counted with each."""
        return sum(map(len, self.responses))

    def cost(self, *, padded: bool) -> int:
        """Tokens that a pass over all of them computes on, `padded` to the longest."""
        return len(self.responses) * max(map(len, self.responses)) if padded else self.size

    def answers(self) -> list[TokenSequence]:
        """Prompt and response of each."""
        return [TokenSequence(ids[: self.prompt_tokens], ids[self.prompt_tokens :]) for ids in self.responses]


class _Malformed(ValueError):
    """What is wrong with a row, without where it is."""


def read_preferences(source: str, sources: Sources, columns: Columns = PLAIN) -> list[Preference]:
    """The rows of a file, or of a `file.py:function` of the user. Raises InputError naming row and column."""
    found, refusals = list[Preference](), Refusals()
    # The shape names the columns already, since conversations are under our names what they begin with.
    theirs = {name: vars(columns)[name] for name in ("prompt", *PAIR) if vars(columns)[name] != name}
    ours = replace(columns, prompt="prompt")
    for where, row, _ in read_rows(source, sources, ours, partial(_prompted, theirs)):
        with refusals:
            try:
                found.append(Preference(row["prompt"], _responses(row), _margin(row), where))
            except _Malformed as error:
                raise InputError(f"{where} {error}") from None
    refusals.tell()
    return found


def held_out_trained(train: Sequence[Preference], evaluation: Sequence[Preference], spec: PreferencesSpec) -> int:
    """Held-out rows whose prompt is trained on. Raises InputError where all of them are such."""
    known, held_out = set(keys_of_prompts(train)), keys_of_prompts(evaluation)
    count = sum(key in known for key in held_out)
    if count == len(held_out):
        raise InputError(
            f"{spec.evaluation}: all {count} held-out rows ({len(set(held_out))} prompts) have a prompt that is among "
            f"the {len(known)} prompts of {spec.train}: accuracy would be measured on what was learned; hold out rows "
            "with other prompts"
        )
    return count


def keys_of_prompts(preferences: Iterable[Preference]) -> list[bytes]:
    """By which they are compared with others."""
    return [content_key(row.where, one_form(row.prompt, chat=False)) for row in preferences]


def tokenized(
    preferences: Iterable[Preference],
    tokenizer: Any,
    name: str,
    *,
    max_tokens: int,
    context_length: int | None,
    by_policy: bool = False,
) -> list[Ranking]:
    """As a reward model will read them, or `by_policy` as a policy reads prompts and writes responses, EOS at the end.

    Raises InputError for texts that are too long, or alike as tokens. `name` is what the tokenizer is called there.
    """
    rankings, refusals = list[Ranking](), Refusals()
    for preference in preferences:
        with refusals:
            ranking = _ranking(preference, tokenizer, name, by_policy=by_policy)
            length = max(map(len, ranking.responses))
            if length > max_tokens:
                limit = f"{'preferences' if by_policy else 'dataset'}.max_tokens={max_tokens}"
                raise InputError(
                    f"{preference.where} has a text of {length} tokens, but {limit}: raise the limit or drop the row"
                )
            if context_length is not None and length > context_length:
                raise InputError(
                    f"{preference.where} has a text of {length} tokens, beyond the model's context {context_length}: "
                    "shorten it"
                )
            _check_texts(preference, ranking, by_policy=by_policy)
            rankings.append(ranking)
    refusals.tell()
    return rankings


def _ranking(preference: Preference, tokenizer: Any, name: str, *, by_policy: bool) -> Ranking:
    from ppo_core.data.tokenization import encode_completion, encode_prompt, scored_tokens  # transformers: 0.7 s

    prompt, texts, margin, where = preference
    try:
        asked = encode_prompt(tokenizer, prompt) if by_policy else []
        if by_policy:
            responses = [[*asked, *encode_completion(tokenizer, text)] for text in texts.values()]
        else:
            responses = [scored_tokens(tokenizer, prompt, text, name) for text in texts.values()]
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Ranking(responses, margin, len(asked))


def _check_texts(preference: Preference, ranking: Ranking, *, by_policy: bool) -> None:
    where = preference.where
    if not all(ranking.responses) or (by_policy and not ranking.prompt_tokens):
        raise InputError(f"{where} has an empty {'prompt' if by_policy else 'text'} (no tokens): give it some text")
    if twins := _twins(ranking.responses):
        names = " and ".join(list(preference.responses)[index] for index in twins)
        raise InputError(
            f"{where}: {names} become the same tokens: drop the row, or use a tokenizer that tells them apart"
        )


def write_rankings(path: Path, rankings: Sequence[Ranking]) -> None:
    """A row each."""
    pq.write_table(pa.Table.from_pylist([ranking._asdict() for ranking in rankings], schema=RANKINGS), path)


def read_rankings(path: Path) -> list[Ranking]:
    """The rows of a preference dataset's `train.parquet` or `eval.parquet`, in file order."""
    return [Ranking(**row) for row in pq.read_table(path).to_pylist()]


def _renamed(names: Mapping[str, str], where: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row under our names. Raises InputError where it lacks one of them; a ranking needs no pair."""
    for ours, theirs in names.items():
        if theirs not in row and not (ours in PAIR and "responses" in row):
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
    prompt = row.get("prompt", asked)
    if prompt not in (asked, _content(asked[-1])):
        raise InputError(
            f"{where} has prompt={_short(prompt)}, but its conversations ask {_short(_content(asked[-1]))}: leave the "
            "prompt out"
        )
    return {**row, "prompt": asked, "chosen": [chosen], "rejected": [rejected]}


def _content(message: Any) -> Any:
    return message.get("content") if isinstance(message, Mapping) else message


def _responses(row: Mapping[str, Any]) -> dict[str, str]:
    columns = ", ".join(sorted(map(str, row)))
    if "responses" in row:
        if set(PAIR) & set(row):
            raise _Malformed(f"has both responses and chosen or rejected (columns {columns}): keep one form")
        listed = row["responses"]
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
    if twins := _twins(list(texts.values())):
        first, second = (list(texts)[index] for index in twins)
        raise _Malformed(f"has {first} == {second} ({_short(texts[first])}): neither is better; drop the row")
    return texts


def _text(value: Any, column: str) -> str:
    """A text, or the one message of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
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
    if "responses" in row:
        raise _Malformed("has margin and responses: a margin needs chosen and rejected; leave it out")
    return number


def _number(value: Any) -> float | None:
    """A number, also one that is written as text, as tables of text have them."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _twins(values: Sequence[Any]) -> tuple[int, int] | None:
    """The first two that are equal."""
    for later, value in enumerate(values):
        if (first := values.index(value)) < later:
            return first, later
    return None


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
