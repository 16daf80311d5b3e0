"""Rows in the forms that people have them in, and the words in which what is none is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from ppo_core.data.rows import PLAIN, Columns, read_rows
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError

USER = [{"role": "user", "content": "w3 w4"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "w3, \"w4\"", "answer": "1"}, {"prompt": "ü\nw5", "answer": None}, {"prompt": "w6", "answer": "007"},
]  # fmt: skip
CHATS = [{"prompt": USER, "level": 1}, {"prompt": [*USER, {"role": "assistant", "content": "w5"}, *USER], "level": 2}]


def write_lines(folder: Path, *rows: Any) -> str:
    (folder / "rows.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return "rows.jsonl"


def contents(source: str, folder: Path, columns: Columns = PLAIN) -> list[dict[str, Any]]:
    return [row.content for row in read_rows(source, Sources(folder), columns)]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        table.writeheader()
        table.writerows(rows)


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_saved(folder: Path, table: pa.Table) -> None:
    """What `datasets.save_to_disk` writes (datasets 4: arrow_dataset.py, save_to_disk), in two files."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_stream(folder / names[0], table.slice(0, 1))
    write_stream(folder / names[1], table.slice(1))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def write_as(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    match path.name:
        case "rows.jsonl" | "lines.json":
            path.write_text("\n".join(map(json.dumps, rows)))
        case "rows.json":
            path.write_text(json.dumps(rows, indent=1))
        case "rows.csv" | "rows.tsv":
            write_table(path, rows)
        case "rows.parquet":
            pq.write_table(table, path, row_group_size=2)
        case "rows.feather":
            pyarrow.feather.write_feather(table, path)
        case "rows.arrow":
            write_stream(path, table)
        case _:
            write_saved(path, table)


TEXTS = ("rows.jsonl", "rows.json", "lines.json", "rows.csv", "rows.tsv")
TYPED = ("rows.parquet", "rows.feather", "rows.arrow", "saved", "both/train")


@pytest.mark.parametrize("name", [*TEXTS, *TYPED])
def test_the_same_rows_come_out_of_every_form(tmp_path: Path, name: str) -> None:
    write_as(tmp_path / name, ROWS)
    assert contents(name, tmp_path) == ROWS
    rows = read_rows(name, Sources(tmp_path))
    assert list(rows) == list(rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", *TYPED])
def test_messages_and_numbers_keep_their_types(tmp_path: Path, name: str) -> None:
    write_as(tmp_path / name, CHATS)
    assert contents(name, tmp_path) == CHATS


def test_many_rows_come_in_their_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{number}"} for number in range(5000)]
    for name in ("rows.parquet", "rows.feather", "rows.json"):
        write_as(tmp_path / name, rows)
        assert contents(name, tmp_path) == rows


def test_a_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    write_as(tmp_path / "both" / "train", ROWS)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"both holds the splits train, test: name one of them, as in both/train"):
        contents("both", tmp_path)
    with pytest.raises(InputError, match=r"is not a folder of rows only, nor one that datasets.save_to_disk wrote"):
        contents(".", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.csv",
            "prompt,answer\nw3,1\nw4,5,6\n",
            r"rows.csv:3 has 3 cells, but the header has 2: put cells that hold ','",
        ),
        ("rows.csv", 'prompt,answer\n"w3\n', r"rows.csv:2 is not a valid CSV or TSV file: unexpected end of data"),
        ("rows.csv", "prompt,prompt\nw3,1\n", r"rows.csv has several columns named prompt: rename them"),
        (
            "rows.csv",
            "question,answer\nw3,1\n",
            r"row 1 \(line 2\) has prompt=None: .*; the row has the columns answer, question",
        ),
        ("rows.csv", 'prompt\n"w3\nw4"\n""\n', r"row 2 \(line 4\) has prompt=None"),
        ("rows.json", '{"prompt": {\n', r"rows.json:1 is not JSON in UTF-8"),
        ("rows.json", '{\n "prompt": "w3"}', r"rows.json is a single JSON object: give an array of objects"),
        (
            "rows.json",
            '[\n{"prompt": "w3"},\n{"prompt": ]',
            r"rows.json:3 is not JSON: Expecting value at column 12$",
        ),
        ("rows.json", '[\n{"prompt": "w3"}\n{"prompt": "w4"}]', r"rows.json:3 is not JSON: a comma or \] is missing"),
        (
            "rows.json",
            '[{"prompt": "w3"}]\n[{"prompt": "w4"}]',
            r"rows.json:2 has more after the end of its array: put",
        ),
        ("rows.json", '[{"prompt": "w3"}, 4]', r"row 2 \(line 1\) is of type int, not an object with a `prompt`$"),
        ("rows.json", "[]", r"rows.json holds no rows"),
        ("rows.parquet", "prompt\nw3\n", r"rows.parquet is named .parquet, but does not contain Parquet"),
        ("rows.jsonl", '\n\n{"question": "w3"}', r"rows.jsonl: row 1 \(line 3\) has prompt=None"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        contents(name, tmp_path)


def test_of_many_unusable_rows_the_first_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    source = write_lines(tmp_path, {"prompt": "w3"}, "{broken", {"prompt": 4}, {"prompt": "w4"}, [1])
    with pytest.raises(InputError, match=r"rows.jsonl:2 is not JSON .* \(2 more rows cannot be used either\)$"):
        contents(source, tmp_path)


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (Columns("question"), {"question": "w3", "level": 1}, {"prompt": "w3", "level": 1}),
        (Columns("question"), {"question": "w3", "prompt": "other"}, {"prompt": "w3"}),
        (Columns("q", "a"), {"q": "w3", "a": "w4", "completion": "w5"}, {"prompt": "w3", "completion": "w4"}),
        (Columns(chat=True), {"prompt": "w3 w4"}, {"prompt": USER}),
        (Columns(chat=True, system_prompt="Be brief."), {"prompt": "w3 w4"}, {"prompt": [SYSTEM, *USER]}),
        (Columns(system_prompt="Be brief."), {"prompt": USER}, {"prompt": [SYSTEM, *USER]}),
        (Columns(system_prompt="Be long."), {"prompt": [SYSTEM, *USER]}, {"prompt": [SYSTEM, *USER]}),
    ],
)
def test_columns_have_the_names_of_the_user_and_prompts_get_what_the_template_needs(
    tmp_path: Path, columns: Columns, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert contents(write_lines(tmp_path, row), tmp_path, columns) == [expected]


def test_of_another_column_of_completions_nothing_takes_the_place(tmp_path: Path) -> None:
    name = write_lines(
        tmp_path, {"prompt": "a", "output": "new", "completion": "old"}, {"prompt": "b", "completion": "c"}
    )
    found = contents(name, tmp_path, Columns(completion="output"))
    assert found == [{"prompt": "a", "completion": "new"}, {"prompt": "b"}]


@pytest.mark.parametrize("before", ["", "\n \n"])
def test_one_long_line_of_json_is_an_array_wherever_its_first_part_ends(tmp_path: Path, before: str) -> None:
    for shift in range(3):
        rows = [{"prompt": "x" * shift + "\u3042" * 400_000}]
        (tmp_path / "rows.json").write_text(before + json.dumps(rows, ensure_ascii=False))
        assert contents("rows.json", tmp_path) == rows


def test_a_system_prompt_before_a_bare_text_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path, {"prompt": USER}, {"prompt": "w3"})
    with pytest.raises(InputError, match=r"row 2 has a text prompt, .*system_prompt: set dataset.chat=true"):
        contents(source, tmp_path, Columns(system_prompt="Be brief."))


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    source = write_lines(tmp_path, {"prompt": "w3", "answer": 1})
    with pytest.raises(
        InputError,
        match=r"row 1 has question=None: .*; the row has the columns answer, prompt: name the right one in prompt_",
    ):
        contents(source, tmp_path, Columns("question"))


@pytest.mark.parametrize("body", ["return [{'prompt': 'w3'}]", "yield {'prompt': 'w3'}"])
def test_rows_may_come_from_a_function(tmp_path: Path, body: str) -> None:
    (tmp_path / "generated.py").write_text(f"def rows():\n    {body}\n")
    assert contents("generated.py:rows", tmp_path) == [{"prompt": "w3"}]


@pytest.mark.parametrize("body", ["raise OSError('no network')", "return None", "yield {}['a']"])
def test_a_function_that_gives_no_rows_is_named(tmp_path: Path, body: str) -> None:
    (tmp_path / "generated.py").write_text(f"def rows():\n    {body}\n")
    with pytest.raises(InputError, match=r"generated.py:rows gave no rows: it raised (OSError|TypeError|KeyError): "):
        contents("generated.py:rows", tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "w3"}, "{broken"], r"rows.jsonl:2 is not JSON in UTF-8: Expecting .* at column 2 \(JSONL"),
        ([], "rows.jsonl holds no rows: give at least one prompt"),
        (["", "  "], "rows.jsonl holds no rows"),
        ([[1]], "row 1 is of type list, not an object with a `prompt`"),
        ([{"prompt": "w3"}, {"question": "w4"}], "row 2 has prompt=None: it must be text, or a list of messages"),
        ([{"prompt": ""}], "row 1 has prompt='': it must be"),
        ([{"prompt": [{"content": "w3"}]}], "row 1 has prompt=.*messages with roles"),
    ],
)
def test_rows_that_are_none_are_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        contents(write_lines(tmp_path, *lines), tmp_path)


def test_files_that_are_missing_or_in_another_encoding_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"there is no file .*none.jsonl: give a path, relative to the spec, of rows as JSONL"
    ):
        contents("none.jsonl", tmp_path)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ü"}'.encode("latin-1"))
    with pytest.raises(InputError, match=r"latin.jsonl:1 is not JSON in UTF-8"):
        contents("latin.jsonl", tmp_path)


WINDOWS = "C:\\data\\rows.jsonl"


@pytest.mark.parametrize("first", ['{"prompt": "w3, w4"}', '\n{"prompt": "w3, w4"}'])
def test_a_mark_of_windows_before_the_rows_is_no_part_of_them(tmp_path: Path, first: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(first.encode("utf-8-sig"))
    assert contents("rows.jsonl", tmp_path) == [{"prompt": "w3, w4"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\n1,2\n", r"is CSV, but its name says JSONL: rename it to rows.csv"),
        (b"prompt\tanswer, if any\n1\t2\n", r"is TSV, but its name says JSONL: rename it to rows.tsv"),
        (b'[\n{"prompt": "w3"}]', r"is one JSON array, but its name says JSONL .*: rename it to rows.json"),
        (b'[{"prompt": "w3"}]', r"row 1 is of type list, not an object .* one JSON array, .*: rename it to rows.json"),
        ('{"prompt": "w3, w4"}\n'.encode("utf-16"), r"is not UTF-8 text .*UTF-16.* iconv -f UTF-16"),
        ('{"prompt": "w3, w4"}\n'.encode("utf-16-le"), r"is not UTF-8"),
        ('{"prompt": "ü, w4"}\n'.encode("latin-1"), r"rows.jsonl:1 is not JSON in UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, r"rows.jsonl:1 is nested too deeply"),
        (b"PAR1\x15\x04,\x15,", r"rows.jsonl is damaged: "),
        (b"ARROW1\0\0abc", r"rows.jsonl is damaged: "),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        contents("rows.jsonl", tmp_path)


def test_a_path_of_windows_names_no_function(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*C:.data.rows.jsonl"):
        contents(WINDOWS, tmp_path)
    (tmp_path / WINDOWS).write_text('{"prompt": "w3"}')
    assert contents(WINDOWS, tmp_path) == [{"prompt": "w3"}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([*USER, {"role": "user"}], "row 1: message 2 of the prompt has no content: give it a text"),
        ([{"role": "user", "content": None}], "message 1 of the prompt has content=None: give it a text"),
        ([{"role": "user", "content": [{"type": "text", "text": "w3"}]}], "message 1 .* a list of parts .* join"),
        ([{"role": "user", "content": "w\ud800"}], r"message 1 .* with '\\ud800' at character 2, a lone surrogate"),
        ("w3 \ud800", r"row 1 has a prompt with '\\ud800' at character 4, a lone surrogate"),
    ],
)
def test_a_message_that_is_no_text_is_named(tmp_path: Path, prompt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        contents(write_lines(tmp_path, {"prompt": prompt}), tmp_path)
