"""Rows of a stored table behave as a list of them, and only those that are asked for are made."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_core.data.tables import EXAMPLES, StoredRows, read_examples
from ppo_core.records import TokenSequence

ROWS = [TokenSequence([number, 1], [number] * (1 + number % 3)) for number in range(9)]


def test_examples_are_read_as_they_were_written(tmp_path: Path) -> None:
    columns = {"prompt_token_ids": [row[0] for row in ROWS], "completion_token_ids": [row[1] for row in ROWS]}
    pq.write_table(pa.table(columns, schema=EXAMPLES), tmp_path / "sft.parquet")
    found = read_examples(tmp_path / "sft.parquet")
    assert list(found) == ROWS
    assert len(found) == 9
    assert [found[place] for place in (0, 5, -1)] == [ROWS[0], ROWS[5], ROWS[-1]]
    assert list(found[2:8:3]) == ROWS[2:8:3]
    with pytest.raises(IndexError):
        found[9]


def test_only_what_is_asked_for_is_made() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    rows = StoredRows(pa.table({"number": list(range(100))}), make)
    assert (rows[7], rows[50:52][1]) == (7, 51)
    assert made == [7, 51]
