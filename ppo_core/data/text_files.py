"""Text files of rows: JSON lines, one JSON array, and tables of commas or tabs."""

from __future__ import annotations

import csv
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ppo_core.records import InputError

SPACE = re.compile(r"\s*")
LONGEST_CELL = 1 << 30


class _KeyAgain(ValueError):
    """An object has a key twice, of which one value would be lost."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        again = next(name for name in found if names.count(name) > 1)
        raise _KeyAgain(f"has the key {again!r} twice in one object: remove one")
    return found


JSON = json.JSONDecoder(object_pairs_hook=_each_key_once)
"""Looking for keys that come again costs less than a tenth of the time that reading rows takes."""


class Found(NamedTuple):
    """What lies at a line of a file (None: the file has no lines): a row, or why none can be read there.

    `file` says which file of a folder it is.
    """

    line: int | None
    content: Any
    file: str = ""


def json_lines(path: Path) -> Iterator[Found]:
    """The document of each line that is not empty, of UTF-8 with or without a mark (BOM)."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(BOM_UTF8).strip()
            if text:
                yield Found(number, _document(path, number, text))


def json_array(path: Path) -> Iterator[Found]:
    """The elements of an array, one after the other. Raises InputError where it ends as none."""
    text = _text(path)
    place, counted, line = _after_space(text, _after_space(text, 0) + 1), 0, 1
    while not text.startswith("]", place):
        counted, line = place, line + text.count("\n", counted, place)
        try:
            content, end = JSON.raw_decode(text, place)
        except _KeyAgain as error:
            raise InputError(f"{path}:{line} {error}") from None
        except ValueError as error:
            wrong = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise InputError(f"{path}:{wrong} is not JSON: {_why(error)}") from None
        except RecursionError:
            raise InputError(f"{path}:{line} is nested too deeply: give flatter objects") from None
        yield Found(line, content)
        place = _after_space(text, end)
        if text.startswith(",", place):
            comma, place = place, _after_space(text, place + 1)
            if text.startswith("]", place):
                line = text.count("\n", 0, comma) + 1
                raise InputError(f"{path}:{line} is not JSON: a comma stands before the ]: remove it")
        elif not text.startswith("]", place):
            line = text.count("\n", 0, place) + 1
            raise InputError(f"{path}:{line} is not JSON: a comma or ] is missing")
    rest = _after_space(text, place + 1)
    if rest < len(text):
        line = text.count("\n", 0, rest) + 1
        raise InputError(
            f"{path}:{line} has more after the end of its array: put all rows into one array, or one object "
            "on each line of a .jsonl file"
        )


TABLES = {".csv": ",", ".tsv": "\t"}
"""Delimiters by the name's end."""


def table_of_text(path: Path, delimiter: str) -> Iterator[Found]:
    """The lines below the header, by its names. Cells are text; an empty one is missing (None)."""
    csv.field_size_limit(LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if repeated := sorted({name for name in header if header.count(name) > 1}):
                raise InputError(f"{path} has several columns named {', '.join(repeated)}: rename them")
            if len(header) == 1:
                _require_no_other(path, header[0], delimiter)
            for cells in reader:
                if len(cells) == len(header):
                    yield Found(reader.line_num, {name: cell or None for name, cell in zip(header, cells, strict=True)})
                elif cells:
                    complaint = f"{path}:{reader.line_num} has {len(cells)} cells, but the header has {len(header)}"
                    yield Found(
                        reader.line_num, InputError(f'{complaint}: put cells that hold {delimiter!r} in "quotes"')
                    )
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num} is not a valid CSV or TSV file: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from None


def _require_no_other(path: Path, column: str, delimiter: str) -> None:
    """Raise InputError where the name of the only column looks like several, with another delimiter."""
    for other in (*TABLES.values(), ";", "|"):
        if other != delimiter and other in column:
            rename = "".join(f", or rename it to {end}" for end, theirs in TABLES.items() if theirs == other)
            raise InputError(
                f"{path} has the one column {column!r}, as if {other!r} separated cells: save it with "
                f"{'commas' if delimiter == ',' else 'tabs'} between them{rename}"
            )


def _document(path: Path, number: int, line: bytes) -> Any:
    try:
        return JSON.decode(line.decode())
    except _KeyAgain as error:
        return InputError(f"{path}:{number} {error}")
    except ValueError as error:
        return InputError(f"{path}:{number} is not JSON in UTF-8: {_why(error)} (JSONL has one JSON object per line)")
    except RecursionError:
        return InputError(f"{path}:{number} is nested too deeply: give flatter objects")


def _why(error: ValueError) -> str:
    """Without the line, which stands before it: of one line of a file it would be 1."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from None


def _after_space(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match is not None
    return match.end()
