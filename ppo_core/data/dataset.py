"""From a user's rows to checked, tokenized prompts and SFT examples."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ppo_core.data.jsonl import json_array, read_jsonl
from ppo_core.records import InputError, PromptRow, canonical_json
from ppo_core.scoring.plugins import RAISED, Sources, load_function, place_of

DRIVE = re.compile(r"[A-Za-z]:[\\/]")
"""How an absolute path of Windows begins, whose colon names no function."""


@dataclass(frozen=True)
class Limits:
    """What fits: `context_length` (None: no limit), `max_prompt_tokens`, `max_response_tokens`."""

    context_length: int | None
    max_prompt_tokens: int
    max_response_tokens: int


class Longest(NamedTuple):
    """The longest prompt of some rows, and which one it is."""

    where: str
    tokens: int


def longest_of(prompts: Sequence[PromptRow], source: str) -> Longest:
    """Of the rows that `source` gave; the first where several are as long."""
    number, row = max(enumerate(prompts, 1), key=lambda item: len(item[1].prompt_token_ids))
    return Longest(f"{source}: row {number}", len(row.prompt_token_ids))


def read_rows(source: str, sources: Sources) -> list[dict[str, Any]]:
    """The rows of a JSONL file or of a `file.py:function` of the user. Raises InputError naming the line."""
    generated = ":" in source and not DRIVE.match(source)
    rows = _generated(source, sources) if generated else read_jsonl(sources.folder / source)
    if not rows:
        raise InputError(f"{source} holds no rows: give at least one prompt")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            array = isinstance(row, list) and not generated
            remedy = f": {json_array(sources.folder / source)}" if array else ""
            raise InputError(f"{source}: row {number} is {type(row).__name__}, not an object with a `prompt`{remedy}")
        _check_prompt(source, number, row)
    return rows


def prompt_rows(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, source: str, answer_column: str, limits: Limits
) -> list[PromptRow]:
    """Tokenize and check prompts; prompt_id is a hash of prompt, answer and metadata, with a count for repeats."""
    seen: dict[str, int] = {}
    prompts = []
    for number, row in enumerate(rows, 1):
        where = f"{source}: row {number}"
        ids = _encoded(where, tokenizer, row["prompt"])
        _check_length(where, ids, limits)
        answer = row.get(answer_column)
        metadata = {key: value for key, value in row.items() if key not in ("prompt", answer_column)}
        try:
            content = canonical_json([row["prompt"], answer, metadata]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{where} is not plain JSON ({error}): give finite numbers and text") from None
        base = hashlib.sha256(content).hexdigest()[:16]
        seen[base] = seen.get(base, 0) + 1
        prompt_id = base if seen[base] == 1 else f"{base}-{seen[base]}"
        prompts.append(PromptRow(prompt_id, row["prompt"], ids, answer, metadata))
    if prompts:
        check_room(longest_of(prompts, source), limits)
    return prompts


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
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, source: str, context_length: int | None
) -> list[dict[str, list[int]]]:
    """Tokenized SFT examples: `prompt_token_ids` and `completion_token_ids` (ending in EOS)."""
    from ppo_core.data.tokenization import encode_completion

    examples = []
    for number, row in enumerate(rows, 1):
        completion = completion_text(row)
        if completion is None:
            raise InputError(
                f"{source}: row {number} has completion={row.get('completion')!r}: SFT needs the columns prompt and "
                "completion, a text or a list of one message"
            )
        where = f"{source}: row {number}"
        _check_text(f"{where} has a completion", completion)
        prompt, answer = _encoded(where, tokenizer, row["prompt"]), encode_completion(tokenizer, completion)
        length = len(prompt) + len(answer)
        if context_length is not None and length > context_length:
            raise InputError(f"{where} has {length} tokens, beyond the model's context {context_length}: shorten it")
        examples.append({"prompt_token_ids": prompt, "completion_token_ids": answer})
    return examples


def completion_text(row: Mapping[str, Any]) -> str | None:
    """The text of a row's `completion`, a text or a list of one message; None where it is neither."""
    completion = row.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        completion = completion[0].get("content")
    return completion if isinstance(completion, str) else None


def _generated(source: str, sources: Sources) -> list[dict[str, Any]]:
    function = load_function(source, sources)
    try:
        return list(function())
    except RAISED as error:
        place = place_of(error, sources)
        raise InputError(f"{source} yields no rows, it raised {type(error).__name__}: {error}{place}") from error


def _check_prompt(source: str, number: int, row: Mapping[str, Any]) -> None:
    prompt, where = row.get("prompt"), f"{source}: row {number}"
    if isinstance(prompt, str) and prompt:
        _check_text(f"{where} has a prompt", prompt)
        return
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt)
    if not messages:
        found = "" if "prompt" in row else f"; its columns are {', '.join(sorted(map(str, row))) or 'none'}"
        raise InputError(f"{where} has prompt={prompt!r}: it must be a text or a list of messages with roles{found}")
    for count, message in enumerate(prompt or [], 1):
        _check_message(f"{where}: message {count} of the prompt", message)


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        _check_text(f"{where} has a content", content)
    elif isinstance(content, list):
        raise InputError(
            f"{where} has a list of parts as its content: join their texts into one, as models of text read"
        )
    elif not message.get("tool_calls"):
        lack = f"content={content!r}" if "content" in message else "no content"
        raise InputError(f"{where} has {lack}: give it a text, as in {{'role': 'user', 'content': 'What is 1+1?'}}")


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} with {text[error.start]!r} at character {error.start + 1}, a lone surrogate, half of a "
            "character: take it out, or write both halves"
        ) from None


def _encoded(where: str, tokenizer: Any, prompt: Any) -> list[int]:
    from ppo_core.data.tokenization import encode_prompt  # transformers: two thirds of a second

    try:
        return encode_prompt(tokenizer, prompt)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _check_length(where: str, ids: list[int], limits: Limits) -> None:
    if not ids:
        raise InputError(f"{where} has a prompt of no tokens: give it some text")
    if len(ids) > limits.max_prompt_tokens:
        raise InputError(
            f"{where} has a prompt of {len(ids)} tokens, but dataset.max_prompt_tokens={limits.max_prompt_tokens}: "
            "raise the limit or drop the row"
        )
