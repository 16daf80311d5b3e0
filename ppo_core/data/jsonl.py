"""Files of JSON lines, and what people give in their place: told what it is, and how it becomes JSON lines."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from ppo_core.records import InputError

TABLES = {".csv": "CSV", ".tsv": "TSV", ".parquet": "PARQUET"}
READERS = {"CSV": ("read_csv", ""), "TSV": ("read_csv", ', sep="\\t"'), "PARQUET": ("read_parquet", "")}
PARQUET = b"PAR1"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_jsonl(path: Path) -> list[Any]:
    """The document of each line that is not empty, of UTF-8 with or without a mark (BOM). Raises InputError."""
    try:
        if not path.is_file():
            raise InputError(
                f"there is no file {path}: give a JSONL file or path/to/file.py:function, relative to the spec"
            )
        _refuse_other_kinds(path)
        with path.open("rb") as lines:
            texts = (line.removeprefix(BOM_UTF8).strip() for line in lines)
            return [_document(path, number, text) for number, text in enumerate(texts, 1) if text]
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give this user the right to read it") from None


def json_array(path: Path) -> InputError:
    """The refusal of a file that is one array."""
    return InputError(
        f"{path} is one JSON array, and prompts are JSONL, one object per line: convert it with  python -c 'import "
        f'pandas; pandas.read_json("{path}").to_json("{path.stem}.jsonl", orient="records", lines=True)\''
    )


def _document(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except ValueError as error:
        raise InputError(f"{path}:{number} is not JSON in UTF-8: {error} (JSONL has one object per line)") from None
    except RecursionError:
        raise InputError(f"{path}:{number} is nested too deeply: give flatter objects") from None


def _refuse_other_kinds(path: Path) -> None:
    """Raise InputError, with a way to convert it, for a file that plainly holds something else than JSON lines."""
    with path.open("rb") as content:
        first = content.readline()
    if first.startswith(PARQUET):
        raise _table(path, "PARQUET")
    if first.startswith(UTF_16) or b"\0" in first:
        raise InputError(
            f"{path} is not UTF-8, but UTF-16 or no text at all: save it as UTF-8, for example with  iconv -f UTF-16 "
            f"-t UTF-8 {path} > {path.stem}.utf8.jsonl"
        )
    if path.suffix.lower() in TABLES:
        raise _table(path, TABLES[path.suffix.lower()])
    try:
        text = first.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return  # the line with that byte is named
    if text == "[":
        raise json_array(path)
    if not text.startswith(("[", "{")) and ("\t" in text or "," in text):
        raise _table(path, "TSV" if "\t" in text else "CSV")


def _table(path: Path, kind: str) -> InputError:
    reader, options = READERS[kind]
    return InputError(
        f"{path} is {kind}, and prompts are JSONL, one object per line: convert it with  python -c 'import pandas; "
        f'pandas.{reader}("{path}"{options}).to_json("{path.stem}.jsonl", orient="records", lines=True)\''
    )
