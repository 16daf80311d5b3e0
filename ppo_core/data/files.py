"""Files of rows as people have them: what each is, and its rows one after the other.

JSON lines, JSON, CSV, TSV     by the name; a name that the content contradicts is refused
Parquet, Arrow                 by the first bytes
a folder                       what `datasets.save_to_disk` wrote, or files of rows, in the order of their names
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ppo_core.data.text_files import TABLES, Found, json_array, json_lines, table_of_text
from ppo_core.records import InputError

GZIP = b"\x1f\x8b"
BINARY = {".parquet": "Parquet", ".arrow": "Arrow", ".feather": "Arrow"}
PARQUET, ARROW, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
ROWS = {*TABLES, *BINARY, ".jsonl", ".json"}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
ROWS_AT_ONCE = 1024
FORMS = "JSONL, JSON, CSV, TSV, Parquet or Arrow, or a folder of these, or one that datasets.save_to_disk wrote"


def rows_of_file(path: Path) -> Iterator[Found]:
    """The rows of a file or a saved dataset. Raises InputError where that is none, or cannot be read."""
    try:
        yield from _reader(path)(path)
    except OSError as error:
        if error.strerror is None:  # pyarrow's, for a file that is cut
            raise InputError(f"{path} is damaged: {' '.join(str(error).split())}") from None
        raise InputError(f"{path} cannot be read ({error.strerror}): give this user permission to read it") from None
    except pa.ArrowException as error:
        raise InputError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def _reader(path: Path) -> Callable[[Path], Iterator[Found]]:
    if path.is_dir():
        return _parts if _are_rows(path) else _saved_dataset
    if not path.is_file():
        raise InputError(
            f"there is no file {path}: give a path, relative to the spec, of rows as {FORMS}, or of a function as "
            "path/to/file.py:function"
        )
    with path.open("rb") as content:
        first = content.readline(1 << 20)
        while first and not first.removeprefix(BOM_UTF8).strip():
            first = content.readline(1 << 20)
    suffix = path.suffix.lower()
    if first.startswith(PARQUET):
        return _parquet
    if first.startswith((ARROW, ARROW_STREAM)):
        return _arrow
    if suffix in BINARY:
        raise InputError(
            f"{path} is named {suffix}, but does not contain {BINARY[suffix]}: rename it after what it contains"
        )
    if first.startswith(GZIP):
        raise InputError(f"{path} is compressed with gzip: unpack it, for example with  gunzip {path}")
    if first.startswith(UTF_16) or b"\0" in first:
        raise InputError(
            f"{path} is not UTF-8 text (it looks like UTF-16, or binary): save it as UTF-8, for example with  iconv -f "
            f"UTF-16 -t UTF-8 {path} > {path.stem}.utf8{suffix}"
        )
    if suffix in TABLES:
        return lambda path: table_of_text(path, TABLES[suffix])
    return _json_reader(path, first, suffix)


def _json_reader(path: Path, first: bytes, suffix: str) -> Callable[[Path], Iterator[Found]]:
    # What cannot be decoded is named with its line later; the first part of a long line may end within a character.
    text = first.decode("utf-8-sig", errors="ignore").strip()
    if suffix == ".json":
        if text.startswith("["):
            return json_array
        if text == "{":
            raise InputError(f"{path} is a single JSON object: give an array of objects, or one object per line")
    elif text == "[":
        raise array_named_lines(path)
    elif not text.startswith(("[", "{")) and ("\t" in text or "," in text):
        kind = "TSV" if "\t" in text else "CSV"
        raise InputError(f"{path} is {kind}, but its name says JSONL: rename it to {path.stem}.{kind.lower()}")
    return json_lines


def array_named_lines(path: Path) -> InputError:
    """The refusal of an array under another name."""
    return InputError(
        f"{path} is one JSON array, but its name says JSONL (one object per line): rename it to {path.stem}.json"
    )


def _parquet(path: Path) -> Iterator[Found]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from _rows_of(batch, path)


def _arrow(path: Path) -> Iterator[Found]:
    """Both forms of Arrow's files: `datasets` writes streams."""
    with pa.memory_map(str(path)) as content:
        if content.read(len(ARROW)) == ARROW:
            file = pa.ipc.open_file(content)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            content.seek(0)
            batches = iter(pa.ipc.open_stream(content))
        for batch in batches:
            for start in range(0, len(batch), ROWS_AT_ONCE):
                yield from _rows_of(batch.slice(start, ROWS_AT_ONCE), path)


def _saved_dataset(path: Path) -> Iterator[Found]:
    if (path / "dataset_dict.json").is_file():
        splits = [str(name) for name in _document(path / "dataset_dict.json").get("splits", [])] or ["train"]
        raise InputError(
            f"{path} holds the splits {', '.join(splits)}: name one of them, as in {path.name}/{splits[0]}"
        )
    if not (path / "state.json").is_file():
        raise InputError(
            f"{path} is not a folder of rows only, nor one that datasets.save_to_disk wrote (no state.json): give "
            f"{FORMS}"
        )
    state = _document(path / "state.json")
    if state.get("_indices_data_files"):
        raise InputError(f"{path} was saved with a selection of its rows: save dataset.flatten_indices() instead")
    for entry in state.get("_data_files", []):
        yield from _arrow(path / Path(entry["filename"]).name)


def _are_rows(folder: Path) -> bool:
    """Whether all files of a folder, at any depth, are of rows by their names."""
    names = [path.name for path in _files(folder)]
    return bool(names) and "state.json" not in names and all(Path(name).suffix.lower() in ROWS for name in names)


def _files(folder: Path) -> list[Path]:
    """All of them at any depth, but for hidden ones, which count in no key: editors leave copies there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _parts(folder: Path) -> Iterator[Found]:
    for path in _files(folder):
        for found in rows_of_file(path):
            yield found._replace(file=str(path.relative_to(folder)))


def _document(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): save the dataset again") from None


def _rows_of(batch: pa.RecordBatch, path: Path) -> Iterator[Found]:
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in columns:
            raise InputError(f"{path} has several columns named {name}: rename them")
        try:
            values = column.to_pylist()
            columns[name] = list(map(without_none, values)) if has_messages(column.type) else values
        except (ValueError, OverflowError) as error:  # a text that is no UTF-8, a date that Python does not have
            raise InputError(f"{path}: the column {name} cannot be read ({error}): write it anew, or drop it") from None
    names = [*columns]
    return (Found(None, dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True))


def has_messages(kind: pa.DataType) -> bool:
    """Whether a column has lists of messages: objects with a role and a content."""
    listed = any(is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    fields = kind.value_type if listed else None
    return isinstance(fields, pa.StructType) and all(fields.get_field_index(name) >= 0 for name in ("role", "content"))


def without_none(messages: list[dict[str, Any] | None] | None) -> list[dict[str, Any] | None] | None:
    """Messages of a table as they were before it gave each of them all fields that any has; their `content` stays.

    >>> call = {"path": "x", "content": None}
    >>> without_none([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}])
    [{'role': 'assistant', 'content': None, 'tool_calls': [{'path': 'x'}]}]
    """

    def message(value: dict[str, Any] | None) -> dict[str, Any] | None:
        return value if value is None else {"role": None, "content": None, **given(value)}

    return messages if messages is None else list(map(message, messages))


def given(value: Any) -> Any:
    """A value without the None in its objects: tables give an object all fields that any has."""
    if isinstance(value, Mapping):
        return {key: given(inner) for key, inner in value.items() if inner is not None}
    return [given(inner) for inner in value] if isinstance(value, list) else value
