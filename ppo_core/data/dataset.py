"""From a user's rows to checked, tokenized prompts and SFT examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.records import InputError, PromptRow, canonical_json
from ppo_core.scoring.plugins import Sources, load_function, place_of

TABLES = {".csv": "read_csv", ".tsv": "read_csv", ".parquet": "read_parquet"}


@dataclass(frozen=True)
class Limits:
    """What fits: `context_length` (None: no limit), `max_prompt_tokens`, `max_response_tokens`."""

    context_length: int | None
    max_prompt_tokens: int
    max_response_tokens: int


def read_rows(source: str, sources: Sources) -> list[dict[str, Any]]:
    """The rows of a JSONL file or of a `file.py:function` of the user. Raises InputError naming the line."""
    rows = _generated(source, sources) if ":" in source else _read_jsonl(sources.folder / source)
    if not rows:
        raise InputError(f"{source} holds no rows: give at least one prompt")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            array = isinstance(row, list) and ":" not in source
            remedy = f": {_json_array(sources.folder / source)}" if array else ""
            raise InputError(f"{source}: row {number} is {type(row).__name__}, not an object with a `prompt`{remedy}")
        _check_prompt(source, number, row)
    return rows


def prompt_rows(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, source: str, answer_column: str, limits: Limits
) -> list[PromptRow]:
    """Tokenize and check prompts; prompt_id is a hash of prompt, answer and metadata, with a count for repeats."""
    from ppo_core.data.tokenization import encode_prompt  # transformers: two thirds of a second

    seen: dict[str, int] = {}
    prompts = []
    for number, row in enumerate(rows, 1):
        ids = encode_prompt(tokenizer, row["prompt"])
        _check_length(f"{source}: row {number}", ids, limits)
        answer = row.get(answer_column)
        metadata = {key: value for key, value in row.items() if key not in ("prompt", answer_column)}
        try:
            content = canonical_json([row["prompt"], answer, metadata])
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{source}: row {number} is not plain JSON ({error}): give finite numbers and text"
            ) from None
        base = hashlib.sha256(content.encode()).hexdigest()[:16]
        seen[base] = seen.get(base, 0) + 1
        prompt_id = base if seen[base] == 1 else f"{base}-{seen[base]}"
        prompts.append(PromptRow(prompt_id, row["prompt"], ids, answer, metadata))
    return prompts


def supervised_rows(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, source: str, context_length: int | None
) -> list[dict[str, list[int]]]:
    """Tokenized SFT examples: `prompt_token_ids` and `completion_token_ids` (ending in EOS)."""
    from ppo_core.data.tokenization import encode_completion, encode_prompt

    examples = []
    for number, row in enumerate(rows, 1):
        completion = completion_text(row)
        if completion is None:
            raise InputError(
                f"{source}: row {number} has completion={row.get('completion')!r}: SFT needs the columns prompt and "
                "completion, a text or a list of one message"
            )
        prompt, answer = encode_prompt(tokenizer, row["prompt"]), encode_completion(tokenizer, completion)
        length = len(prompt) + len(answer)
        if context_length is not None and length > context_length:
            raise InputError(
                f"{source}: row {number} has {length} tokens, beyond the model's context {context_length}: shorten it"
            )
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
    except Exception as error:
        place = place_of(error, sources)
        raise InputError(f"{source} yields no rows, it raised {type(error).__name__}: {error}{place}") from error


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(
            f"there is no file {path}: give a JSONL file or path/to/file.py:function, relative to the spec"
        )
    rows = []
    _refuse_other_kinds(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(json.loads(line.decode()))
                except ValueError as error:
                    raise InputError(
                        f"{path}:{number} is not JSON in UTF-8: {error} (JSONL has one object per line)"
                    ) from None
    return rows


def _refuse_other_kinds(path: Path) -> None:
    """Raise InputError, with a way to convert it, for a file that plainly holds something else than JSON lines."""
    suffix = path.suffix.lower()
    if suffix in TABLES:
        raise _table(path, suffix[1:].upper(), TABLES[suffix], ', sep="\\t"' if suffix == ".tsv" else "")
    with path.open("rb") as content:
        first = content.readline().strip()
    if first == b"[":
        raise _json_array(path)
    if b"," in first and first[:1] not in b"[{":
        raise _table(path, "CSV", "read_csv", "")


def _table(path: Path, kind: str, reader: str, options: str) -> InputError:
    return InputError(
        f"{path} is {kind}, and prompts are JSONL, one object per line: convert it with  python -c 'import pandas; "
        f'pandas.{reader}("{path}"{options}).to_json("{path.stem}.jsonl", orient="records", lines=True)\''
    )


def _json_array(path: Path) -> InputError:
    return InputError(
        f"{path} is one JSON array, and prompts are JSONL, one object per line: convert it with  python -c 'import "
        f'pandas; pandas.read_json("{path}").to_json("{path.stem}.jsonl", orient="records", lines=True)\''
    )


def _check_prompt(source: str, number: int, row: Mapping[str, Any]) -> None:
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt:
        return
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt)
    if not messages:
        found = "" if "prompt" in row else f"; its columns are {', '.join(sorted(map(str, row))) or 'none'}"
        raise InputError(
            f"{source}: row {number} has prompt={prompt!r}: it must be a text or a list of messages with roles{found}"
        )


def _check_length(where: str, ids: list[int], limits: Limits) -> None:
    if not ids:
        raise InputError(f"{where} has a prompt of no tokens: give it some text")
    if len(ids) > limits.max_prompt_tokens:
        raise InputError(
            f"{where} has a prompt of {len(ids)} tokens, but dataset.max_prompt_tokens={limits.max_prompt_tokens}: "
            "raise the limit or drop the row"
        )
    room = None if limits.context_length is None else limits.context_length - len(ids)
    if room is not None and limits.max_response_tokens > room:
        remedy = f"lower it to {room}" if room > 0 else "drop the row"
        raise InputError(
            f"rollout.max_response_tokens={limits.max_response_tokens} does not fit the model's context "
            f"{limits.context_length} after the prompt of {len(ids)} tokens in {where}: {remedy}"
        )
