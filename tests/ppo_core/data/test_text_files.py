"""Rows of text files that cannot be used: where they are, also when the file itself ends as none of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_core.data.rows import read_rows
from ppo_core.data.text_files import table_of_text
from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError

GOOD = '{"prompt": "w3"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", f'[\n{GOOD},\n\n{{\n"prompt": 4}}]', r"^a.json: row 2 \(line 4\) has prompt=4: it must be text"),
        ("a.json", f"[\n\n{GOOD},\n[1], 5, {GOOD}, 6]", r"^a.json: row 2 \(line 4\) is of type list, .* \(2 more rows"),
        ("a.json", f"[{GOOD},\n\n[1]]", r"^a.json: row 2 \(line 3\) is of type list, not an object with a `prompt`$"),
        ("a.json", f'[4,\n{GOOD},\n{{"prompt"}}]', r"^a.json: row 1 is of type int, .* \(1 more row cannot be used"),
        ("a.json", f"[{GOOD},\n{GOOD}\n{GOOD}]", r"/a.json:3 is not JSON: a comma or \] is missing$"),
        ("a.json", f"[{GOOD},\n{GOOD},\n]", r"/a.json:2 is not JSON: a comma stands before the \]: remove it$"),
        ("a.json", f"[{GOOD},\n  , {GOOD}]", r"/a.json:2 is not JSON: Expecting value"),
        ("a.json", f'[{GOOD},\n{{"prompt": "a",\n"prompt": "b"}}]', "/a.json:2 has the key 'prompt' twice in one obj"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": "b", "at": {"x": 1, "y": 2, "x": 1}}',
            "/a.jsonl:2 has the key 'x' twice in one object: remove one",
        ),
        ("a.json", f"[{GOOD},\n{'9' * 5000}]", r"/a.json:2 is not JSON: Exceeds the limit"),
        ("a.json", f"[{GOOD},\n{'[' * 200_000}", r"/a.json:2 is nested too deeply: give flatter objects$"),
        (
            "a.csv",
            "prompt;x\nw3;1\n",
            r"/a.csv has the one column 'prompt;x', as if ';' separated .* with commas between them$",
        ),
        ("a.tsv", "prompt|x\nw3|1\n", r"/a.tsv has the one column .*, as if '\|' .* with tabs between them$"),
        (
            "a.csv",
            "prompt\tx\nw3\t1\n",
            r"/a.csv has the one column .* with commas between them, or rename it to .tsv$",
        ),
        ("a.tsv", "prompt,x\nw3,1\n", r"/a.tsv has the one column .* with tabs between them, or rename it to .csv$"),
        ("a.csv", 'prompt,x\n,1\n"w3\n', r"^a.csv: row 1 \(line 2\) has prompt=None.* \(1 more row cannot be used"),
    ],
    ids=[
        "a row",
        "several",
        "a list",
        "a row, then no JSON",
        "no comma",
        "a last comma",
        "two commas",
        "a key again",
        "a key again within",
        "a number",
        "depth",
        "semicolons",
        "bars in place of tabs",
        "tabs",
        "commas in place of tabs",
        "a row, then no CSV",
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_line_whatever_follows(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        list(read_rows(name, Sources(tmp_path)))


def test_the_only_column_may_have_a_comma_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"prompt, in English"\nw3\n')
    (row,) = table_of_text(tmp_path / "a.csv", ",")
    assert row.content == {"prompt, in English": "w3"}


def test_a_row_of_a_folder_is_named_with_its_file(tmp_path: Path) -> None:
    """Rows are counted in each file by itself."""
    folder = tmp_path / "rows"
    (folder / "below").mkdir(parents=True)
    (folder / "a.jsonl").write_text(f"{GOOD}\n" * 3)
    (folder / "below" / "b.csv").write_text('prompt,level\n"w3\nw4",1\nw5,2\n,3\n')
    with pytest.raises(InputError, match=r"^rows: row 3 of below/b.csv \(line 5\) has prompt=None: it must be text"):
        list(read_rows("rows", Sources(tmp_path)))
    (folder / "below" / "b.csv").unlink()
    (folder / "c.jsonl").write_text(f"{GOOD}\n[{GOOD}]")
    with pytest.raises(InputError, match=r"^rows: row 2 of c.jsonl is of type list, .*/rows/c.jsonl is one JSON array"):
        list(read_rows("rows", Sources(tmp_path)))
    (folder / "c.jsonl").unlink()
    assert [row.where for row in read_rows("rows", Sources(tmp_path))] == [
        f"rows: row {n} of a.jsonl" for n in (1, 2, 3)
    ]
