"""From a user's rows to checked, tokenized prompts and SFT examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ppo_core.data.number_columns import NumberColumn
from ppo_core.data.rows import Refusals, Row, check_text, shown, value_in
from ppo_core.records import InputError, PromptRow, canonical_json

T = TypeVar("T")
Encoded = list[int] | InputError
"""The token ids of a prompt, or why there are none."""


@dataclass(frozen=True)
class Limits:
    """What fits: `context_length` (None: no limit), `max_prompt_tokens`, `max_response_tokens`."""

    context_length: int | None
    max_prompt_tokens: int
    max_response_tokens: int

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that may stand before a response of full length."""
        room = self.max_prompt_tokens if self.context_length is None else self.context_length - self.max_response_tokens
        return min(self.max_prompt_tokens, room)

    @property
    def key(self) -> str:
        """The key of a spec that bounds the longest prompt."""
        if self.longest_prompt() == self.max_prompt_tokens:
            return "max_prompt_tokens"
        return f"rollout.max_response_tokens={self.max_response_tokens} (of the model's context {self.context_length})"


class Longest(NamedTuple):
    """The longest prompt of some rows, and which one it is."""

    where: str
    tokens: int


@dataclass
class PromptMaker:
    """Makes prompts of rows; `longest` is the first of the longest so far, `refusals` are those that cannot be used.

    A prompt_id is what the row has in `id_column`, or a hash of prompt, answer and metadata, with a count for repeats.
    `numbers` are columns that the run reads, and `unread` those of them where no row had a value yet, of the columns
    `named` so far.
    """

    tokenizer: Any
    answer_column: str
    limits: Limits
    id_column: str | None = None
    drop_too_long: bool = False
    numbers: Sequence[NumberColumn] = ()
    longest: Longest = field(default=Longest("", 0))
    repeats: dict[str, int] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    refusals: Refusals = field(default_factory=Refusals)
    unread: list[NumberColumn] = field(init=False)
    named: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        """No row was read yet."""
        self.unread = list(self.numbers)

    def check_read(self) -> None:
        """Raise InputError where no row had a value in a column that the run reads."""
        for column in self.unread:
            raise InputError(column.idle(self.named))

    def prompts(self, rows: Sequence[Row], tokens: Sequence[Encoded]) -> Iterator[PromptRow]:
        """Of rows and their prompts' token ids; one that cannot be used is noted in `refusals`."""
        for (where, row, _), encoding in zip(rows, tokens, strict=True):
            with self.refusals:
                ids = token_ids(encoding)
                if self.drop_too_long and len(ids) > self.limits.longest_prompt():
                    continue
                yield self._prompt(where, row, ids)

    def _prompt(self, where: str, row: Mapping[str, Any], ids: list[int]) -> PromptRow:
        _check_length(where, ids, self.limits)
        if len(ids) > self.longest.tokens:
            self.longest = Longest(where, len(ids))
        answer = value_in(row, self.answer_column)
        metadata = {key: value for key, value in row.items() if key not in ("prompt", self.answer_column)}
        for column in self.numbers:
            column.check(where, metadata)
        if self.unread:
            self.unread = [column for column in self.unread if column.of(metadata) is None]
            self.named.update(metadata)
        prompt_id = self._prompt_id(where, row["prompt"], answer, metadata)
        return PromptRow(prompt_id, row["prompt"], ids, answer, metadata)

    def _prompt_id(self, where: str, prompt: Any, answer: Any, metadata: Mapping[str, Any]) -> str:
        content = as_json(where, [prompt, answer, metadata], {self.answer_column: answer, **metadata})
        if self.id_column is not None:
            return self._own_id(where, metadata.get(self.id_column))
        base = hashlib.sha256(content.encode()).hexdigest()[:16]
        count = self.repeats[base] = self.repeats.get(base, 0) + 1
        return base if count == 1 else f"{base}-{count}"

    def _own_id(self, where: str, given: Any) -> str:
        if not isinstance(given, str | int) or given == "":
            raise InputError(f"{where} has {self.id_column}={shown(given)}: an id must be text or a whole number")
        if (earlier := self.ids.get(str(given))) is not None:
            raise InputError(
                f"{where} has {self.id_column}={given!r}, the same as {earlier}: give each row a unique id"
            )
        self.ids[str(given)] = where
        return str(given)


def check_room(longest: Longest, limits: Limits) -> None:
    """Raise InputError where no response of full length fits behind the longest prompt."""
    room = None if limits.context_length is None else limits.context_length - longest.tokens
    if room is not None and limits.max_response_tokens > room:
        remedy = f"lower it to {room}" if room > 0 else "drop the row"
        raise InputError(
            f"rollout.max_response_tokens={limits.max_response_tokens} does not fit the model's context "
            f"{limits.context_length} after the prompt of {longest.tokens} tokens in {longest.where}: {remedy}"
        )


def supervised_rows(
    rows: Sequence[Row],
    tokens: Sequence[Encoded],
    tokenizer: Any,
    *,
    context_length: int | None,
    refusals: Refusals,
    drop_too_long: bool = False,
) -> Iterator[dict[str, list[int]]]:
    """SFT examples of rows and their prompts' token ids: `prompt_token_ids`, `completion_token_ids` (ending in EOS).

    A row that cannot be used is noted in `refusals`.
    """
    from ppo_core.data.tokenization import encode_completions

    texts = [_completion_or_error(row) for row in rows]
    answers = iter(encode_completions(tokenizer, [text for text in texts if isinstance(text, str)]))
    for row, encoding, text in zip(rows, tokens, texts, strict=True):
        own = next(answers) if isinstance(text, str) else text
        with refusals:
            prompt, answer = token_ids(encoding), token_ids(own)
            length = len(prompt) + len(answer)
            if context_length is not None and length > context_length:
                if drop_too_long:
                    continue
                raise InputError(
                    f"{row.where} has {length} tokens, beyond the model's context {context_length}: shorten it, or "
                    "set dataset.too_long=drop"
                )
            yield {"prompt_token_ids": prompt, "completion_token_ids": answer}


def completion_text(row: Mapping[str, Any]) -> str | None:
    """The text of a row's `completion`, a text or a list of one message; None where it is neither."""
    message = _only_message(row)
    completion = row.get("completion") if message is None else message.get("content")
    return completion if isinstance(completion, str) else None


def in_parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """All items, at most `size` at a time."""
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part


def _only_message(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    completion = row.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        return completion[0]
    return None


def _completion(row: Row) -> str:
    message, completion = _only_message(row.content), completion_text(row.content)
    if message is not None and (role := message.get("role")) != "assistant":
        raise InputError(
            f"{row.where} has a completion of role {role!r}: SFT learns what the assistant answers; give it the role "
            "'assistant', or put what the user says into the prompt"
        )
    if completion is None:
        raise InputError(
            f"{row.where} has completion={shown(row.content.get('completion'))}: SFT needs text or a list of "
            "one message there; name another column in sft.completion_column if it is the wrong one"
        )
    check_text(f"{row.where} has a completion", completion)
    return completion


def _completion_or_error(row: Row) -> str | InputError:
    try:
        return _completion(row)
    except InputError as error:
        return error


def as_json(where: str, content: Any, columns: Mapping[str, Any]) -> str:
    """Canonical JSON. Raises InputError naming the row, and that of the columns which is none."""
    try:
        return canonical_json(content)
    except (TypeError, ValueError, RecursionError) as error:
        wrong = ((name, why) for name, value in columns.items() if (why := _not_json(value)))
        name, reason = next(wrong, ("", str(error)))
        named, remedy = (f" in column {name!r}", f", or set dataset.drop_columns=[{name}]") if name else ("", "")
        raise InputError(
            f"{where} cannot be stored as JSON{named} ({reason}): use text, finite numbers, lists and objects{remedy}"
        ) from None


def _not_json(value: Any) -> str | None:
    try:
        canonical_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None


def encoded(tokenizer: Any, rows: Sequence[Row]) -> list[Encoded]:
    """The token ids of their prompts, and of a prompt that has none the InputError that names its row."""
    from ppo_core.data.tokenization import encode_prompts  # transformers: two thirds of a second

    try:
        return list(encode_prompts(tokenizer, [row.content["prompt"] for row in rows]))
    except InputError as error:
        if len(rows) == 1:
            return [InputError(f"{rows[0].where}: {error}")]
    return [encoding for row in rows for encoding in encoded(tokenizer, [row])]  # for the names of the rows


def token_ids(encoding: Encoded) -> list[int]:
    """Those of a text. Raises InputError where it has none."""
    if isinstance(encoding, InputError):
        raise encoding
    return encoding


def _check_length(where: str, ids: list[int], limits: Limits) -> None:
    if not ids:
        raise InputError(f"{where} has an empty prompt (no tokens): give it some text")
    if len(ids) > limits.max_prompt_tokens:
        raise InputError(
            f"{where} has a prompt of {len(ids)} tokens, but dataset.max_prompt_tokens={limits.max_prompt_tokens}: "
            "raise the limit, or set dataset.too_long=drop"
        )
