"""Parquet tables of the rows in `records`: what people look at, read and written in one place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppo_core.data.shares import Share
from ppo_core.records import InputError, PromptRow, RolloutRow, ScoreRow, TokenSequence

T = TypeVar("T")
SOURCES = "sources.json"
"""In a dataset of several sources."""
ROWS_AT_ONCE = 4096
TOKENS = pa.list_(pa.int32())
TOKEN_SCORES = pa.list_(pa.struct([("token", pa.int32()), ("score", pa.float64())]))
PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("prompt_token_ids", TOKENS),
        ("reference_answer", pa.string()),
        ("metadata", pa.string()),
    ]
)
EXAMPLES = pa.schema([("prompt_token_ids", pa.list_(pa.int64())), ("completion_token_ids", pa.list_(pa.int64()))])
ROLLOUTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_token_ids", TOKENS),
        ("response_token_ids", TOKENS),
        ("response", pa.string()),
        ("sampler_logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
    ]
)


class TableBuilder:
    """One table of many rows, of which only some are Python's objects at a time; its bytes do not tell of parts."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._waiting: list[Mapping[str, Any]] = []

    def add(self, document: Mapping[str, Any]) -> None:
        """One more row."""
        self._waiting.append(document)
        if len(self._waiting) == ROWS_AT_ONCE:
            self._settle()

    def table(self) -> pa.Table:
        """All rows so far."""
        self._settle()
        return pa.Table.from_batches(self._batches, schema=self._schema).combine_chunks()

    def _settle(self) -> None:
        self._batches.append(pa.RecordBatch.from_pylist(self._waiting, schema=self._schema))
        self._waiting = []


class StoredRows(Sequence[T]):
    """The rows of a table, each made of its columns; those that are asked for become Python's objects, no others."""

    def __init__(self, table: pa.Table, make: Callable[..., T]) -> None:
        self._table, self._make = table, make

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[T]:
        for batch in self._table.to_batches(max_chunksize=ROWS_AT_ONCE):
            yield from (self._make(**row) for row in batch.to_pylist())

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> StoredRows[T]: ...

    def __getitem__(self, place: int | slice) -> T | StoredRows[T]:
        if isinstance(place, slice):
            return StoredRows(self._table.take(list(range(len(self))[place])), self._make)
        (row,) = self._table.slice(range(len(self))[place], 1).to_pylist()
        return self._make(**row)


def read_examples(path: Path) -> StoredRows[TokenSequence]:
    """The rows of a dataset's `sft.parquet`, in file order."""

    def example(prompt_token_ids: list[int], completion_token_ids: list[int]) -> TokenSequence:
        return TokenSequence(prompt_token_ids, completion_token_ids)

    return StoredRows(pq.read_table(path), example)


def prompt_document(row: PromptRow) -> dict[str, Any]:
    """Text prompts go to `prompt`, chats as JSON to `messages`, the other is null; answers of any type are JSON."""
    return {
        "prompt_id": row.prompt_id,
        "prompt": row.prompt if isinstance(row.prompt, str) else None,
        "messages": None if isinstance(row.prompt, str) else json.dumps(row.prompt),
        "prompt_token_ids": row.prompt_token_ids,
        "reference_answer": None if row.reference_answer is None else json.dumps(row.reference_answer),
        "metadata": json.dumps(row.metadata, sort_keys=True),
    }


def read_prompts(
    path: Path, *, rows: Sequence[int] | None = None, named: Iterable[str] | None = None
) -> list[PromptRow]:
    """The rows of a dataset's `train.parquet` or `eval.parquet`, in file order: all, or those with such prompt_ids.

    With `rows` these rows, in their order. Only what is returned is Python's objects: a dataset may be large.
    """
    table = pq.read_table(path)
    if rows is not None:
        table = table.take(pa.array(rows, pa.int64()))
    if named is not None:
        table = table.filter(pc.is_in(table["prompt_id"], value_set=pa.array(sorted(set(named)), pa.string())))
    return [
        PromptRow(
            prompt_id=row["prompt_id"],
            prompt=stored_prompt(row),
            prompt_token_ids=row["prompt_token_ids"],
            reference_answer=None if row["reference_answer"] is None else json.loads(row["reference_answer"]),
            metadata=json.loads(row["metadata"]),
        )
        for row in table.to_pylist()
    ]


def read_difficulty(path: Path, column: str) -> list[float]:
    """A number of each row of a dataset's `train.parquet`, which were checked when it was made."""
    texts = pq.read_table(path, columns=["metadata"])["metadata"].to_pylist()
    return [float(json.loads(text)[column]) for text in texts]


def count_prompts(path: Path) -> int:
    """Rows of a dataset's `train.parquet` or `eval.parquet`."""
    return int(pq.read_metadata(path).num_rows)


def write_sources(path: Path, sources: Sequence[Mapping[str, Any]]) -> None:
    """The sources of `train.parquet`, in the order of its rows: `source`, `rows`, and where weighed, its `draws`."""
    path.write_text(json.dumps(sources, indent=2) + "\n")


def read_shares(dataset: Path, split: str) -> list[Share]:
    """What the sources of a dataset's split have in each epoch; empty where all rows count alike."""
    path = dataset / SOURCES
    documents = json.loads(path.read_text()) if split == "train" and path.is_file() else []
    return [Share(one["rows"], one["draws"]) for one in documents if "draws" in one]


def stored_prompt(row: Mapping[str, Any]) -> Any:
    """Text, or a list of messages, of a row as its table has it."""
    return row["prompt"] if row["messages"] is None else json.loads(row["messages"])


def longest_prompt(path: Path) -> int:
    """Tokens of the longest prompt in a dataset's `train.parquet` or `eval.parquet`."""
    ids = pq.read_table(path, columns=["prompt_token_ids"])["prompt_token_ids"]
    return int(pc.max(pc.list_value_length(ids)).as_py())


def write_rollouts(path: Path, rows: Sequence[RolloutRow]) -> None:
    """One row per response, in the order of (prompt, sample); temperatures where any row has one of its own."""
    own = any(row.temperature is not None for row in rows)
    schema = ROLLOUTS.append(pa.field("temperature", pa.float64())) if own else ROLLOUTS
    pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=schema), path)


def rollout_facts(rows: Sequence[RolloutRow]) -> dict[str, Any]:
    """What is said of stored rollouts: their number, their tokens and metrics."""
    lengths = [len(row.response_token_ids) for row in rows]
    return {
        "num_responses": len(rows),
        "num_response_tokens": sum(lengths),
        "metrics": {
            "rollout/response_length": sum(lengths) / len(lengths),
            "rollout/finished": sum(row.finished for row in rows) / len(rows),
        },
    }


def read_rollouts(path: Path) -> list[RolloutRow]:
    """The rows of `rollouts.parquet`, in file order."""
    return [RolloutRow(**row) for row in pq.read_table(path).to_pylist()]


def write_scores(path: Path, rows: Sequence[ScoreRow]) -> None:
    """Columns: prompt_id, sample_index, score, reward/<component> that any row has, truncated, error.

    Where any score came in parts, also token_scores: a list of {token, score}, null for a score in one piece.
    """
    names = component_names(rows)
    schema = pa.schema(
        [
            ("prompt_id", pa.string()),
            ("sample_index", pa.int32()),
            ("score", pa.float64()),
            *((f"reward/{name}", pa.float64()) for name in names),
            ("truncated", pa.bool_()),
            ("error", pa.string()),
            *([("token_scores", TOKEN_SCORES)] if any(row.token_scores is not None for row in rows) else []),
        ]
    )
    documents = [
        {
            "prompt_id": row.prompt_id,
            "sample_index": row.sample_index,
            "score": row.score,
            **{f"reward/{name}": row.components.get(name) for name in names},
            "truncated": row.truncated,
            "error": row.error,
            "token_scores": None if row.token_scores is None else _entries(row.token_scores),
        }
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(documents, schema=schema), path)


def component_names(rows: Sequence[ScoreRow]) -> list[str]:
    """The components that any row has, as they come first: what rewards measure beside a score is optional.

    >>> given = ({"r": 1.0}, {"r": 1.0, "r/m": 2.0})
    >>> component_names([ScoreRow("p", 0, 1.0, components, False, None) for components in given])
    ['r', 'r/m']
    """
    return list(dict.fromkeys(name for row in rows for name in row.components))


def read_scores(path: Path) -> list[ScoreRow]:
    """The rows of `scores.parquet`, in file order."""
    return [
        ScoreRow(
            prompt_id=row["prompt_id"],
            sample_index=row["sample_index"],
            score=row["score"],
            components={k.removeprefix("reward/"): v for k, v in row.items() if k.startswith("reward/")},
            truncated=row["truncated"],
            error=row["error"],
            token_scores=None if row.get("token_scores") is None else _by_token(row["token_scores"]),
        )
        for row in pq.read_table(path).to_pylist()
    ]


def _entries(token_scores: Mapping[int, float]) -> list[dict[str, Any]]:
    return [{"token": token, "score": score} for token, score in sorted(token_scores.items())]


def _by_token(entries: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {entry["token"]: entry["score"] for entry in entries}


def check_aligned(rollouts: Sequence[RolloutRow], scores: Sequence[ScoreRow]) -> None:
    """Raise InputError unless row i of both speaks of the same response."""
    left = [(row.prompt_id, row.sample_index) for row in rollouts]
    right = [(row.prompt_id, row.sample_index) for row in scores]
    if left != right:
        raise InputError(
            f"scores ({len(right)} rows) are not those of these rollouts ({len(left)} rows): score them again"
        )
