"""What a dataset is, in numbers: rows, lengths in tokens, what became of the rows of each source, and leaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppo_core.data.sieve import content_key, one_form
from ppo_core.data.tables import ROWS_AT_ONCE, SOURCES, stored_prompt

BARS = 12
RESPONSES = "responses"
TOKENS = ("prompt_token_ids", "completion_token_ids")


def describe(dataset: Path) -> dict[str, Any]:
    """`splits` with rows and lengths of each, `sources` where there is something to tell of them, `on_both_sides`: rows
    to train on whose prompt is held out too, and `examples_held_out`: SFT examples of such prompts (None without
    held-out prompts or examples)."""
    files = {split: dataset / f"{split}.parquet" for split in ("train", "eval", "sft")}
    splits = {split: lengths(path) for split, path in files.items() if path.is_file()}
    sources = dataset / SOURCES
    return {
        "splits": splits,
        "sources": json.loads(sources.read_text()) if sources.is_file() else [],
        "on_both_sides": on_both_sides(files["train"], files["eval"]) if "eval" in splits else None,
        "examples_held_out": examples_held_out(files["sft"], files["eval"]) if {"sft", "eval"} <= set(splits) else None,
    }


def describe_preferences(folder: Path, held_out_trained: int, sources: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of preferences and their `sources`; a row is as long as its longest text.

    Of both sides it says how many held-out rows have a prompt that is trained on.
    """
    splits = {split: lengths(folder / f"{split}.parquet") for split in ("train", "eval")}
    return {"splits": splits, "sources": sources, "on_both_sides": None, "held_out_trained": held_out_trained}


def lengths(path: Path) -> dict[str, Any]:
    """How long the rows of a table are, in tokens; `histogram` has [from, to, rows] of equal widths."""
    with pq.ParquetFile(path) as file:
        wanted = [name for name in file.schema_arrow.names if name in (*TOKENS, RESPONSES)]
        parts = [_tokens_of(batch) for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted) if len(batch)]
    if not parts:
        return {"rows": 0, "histogram": []}
    tokens = np.concatenate(parts)
    width = -(-int(tokens.max()) // BARS)
    counts = np.bincount((np.maximum(tokens, 1) - 1) // width)
    bars = [[width * bar + 1, width * (bar + 1), int(count)] for bar, count in enumerate(counts)]
    summary = {"mean": float(tokens.mean()), "median": float(np.median(tokens)), "longest": int(tokens.max())}
    return {"rows": len(tokens), **summary, "histogram": bars}


def _tokens_of(rows: pa.RecordBatch) -> np.ndarray[Any, Any]:
    columns = [longest(rows[name]) if name == RESPONSES else sizes(rows[name]) for name in rows.schema.names]
    return np.sum(columns, axis=0)


def sizes(lists: pa.Array) -> np.ndarray[Any, Any]:
    """How many items each list has."""
    return pc.list_value_length(lists).to_numpy().astype(np.int64)


def longest(rows: pa.Array) -> np.ndarray[Any, Any]:
    """The most items that a list of each row has; every row has one."""
    ends = np.cumsum(sizes(rows))
    return np.maximum.reduceat(sizes(pc.list_flatten(rows)), [0, *ends[:-1]])


def on_both_sides(train: Path, held_out: Path) -> int:
    """Rows of `train` whose prompt stands in `held_out` too."""
    known = set(prompt_keys(held_out))
    return sum(key in known for key in prompt_keys(train))


def prompt_keys(path: Path) -> Iterator[bytes]:
    """The key of each row's prompt, by which it is compared with others."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["prompt", "messages"]):
            yield from keys_of(batch)


def keys_of(rows: pa.RecordBatch | pa.Table) -> Iterator[bytes]:
    """The same of rows that are there."""
    for row in rows.select(["prompt", "messages"]).to_pylist():
        yield content_key("a prompt", one_form(stored_prompt(row), chat=False))


def examples_held_out(examples: Path, held_out: Path) -> int:
    """SFT examples whose prompt is held out. They are stored as tokens alone: equal prompts have equal ones."""
    known = set(prompt_tokens(held_out))
    return sum(tokens in known for tokens in prompt_tokens(examples))


def prompt_tokens(path: Path) -> Iterator[bytes]:
    """The token ids of each row's prompt."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["prompt_token_ids"]):
            lists = batch.column(0)
            ends = np.cumsum(pc.list_value_length(lists).to_numpy())
            for ids in np.split(lists.flatten().to_numpy().astype(np.int64), ends[:-1]):
                yield ids.tobytes()
