"""Files of columns, Parquet and Arrow: what of them cannot become rows is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppo_core.data.files import rows_of_file
from ppo_core.records import InputError


def written(path: Path, table: pa.Table) -> Path:
    """As Parquet, or as a stream of Arrow by its name."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_name_of_two_columns_is_refused(tmp_path: Path, name: str) -> None:
    """As a row they would be one: the first would be lost."""
    columns = [pa.array(["1+1="]), pa.array(["2"]), pa.array(["3"])]
    path = written(tmp_path / name, pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"]))
    with pytest.raises(InputError, match=rf"{name} has several columns named answer: rename them"):
        list(rows_of_file(path))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_what_python_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    no_text = pa.array([b"1+1=\xff"]).view(pa.string())
    path = written(tmp_path / name, pa.table({"answer": ["2"], "prompt": no_text}))
    with pytest.raises(InputError, match=rf"{name}: the column prompt cannot be read \('utf-8' codec can't decode"):
        list(rows_of_file(path))
    late = pa.array([2**40]).cast(pa.timestamp("s"))
    path = written(tmp_path / name, pa.table({"prompt": ["1+1="], "when": late}))
    with pytest.raises(InputError, match=rf"{name}: the column when cannot be read \(.*: write it anew, or drop it"):
        list(rows_of_file(path))
