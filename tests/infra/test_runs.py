"""The records of a run: written once, whole, and never taken for something else."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from infra.filesystem import LocalFiles, StoreReadOnly, StoreUnsupported
from infra.runs import (
    InvalidRunName,
    RecordCorrupted,
    RecordExists,
    RecordFormatTooNew,
    RecordMissing,
    RunRecords,
    list_runs,
    validate_run_name,
)

ROOT = Path(__file__).resolve().parents[2]
RECORD = {
    "checkpoint": {"kind": "checkpoint", "digest": "ab"},
    "metrics": {"kl": 0.1 + 0.2},
    "note": "größer",
    "n": None,
}


def test_records_come_back_as_written(tmp_path: Path):
    records = RunRecords(tmp_path, "run-1.a_B")
    assert (records.last(), records.all(), records.read_spec()) == (None, [], None)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 12, 1_000_000):
        records.commit(iteration, {**RECORD, "iteration": iteration})
    again = RunRecords(f"file://{tmp_path}", "run-1.a_B")
    assert again.read_spec() == {"seed": 1}
    assert again.last() == 1_000_000
    assert [record["iteration"] for record in again.all()] == [0, 1, 12, 1_000_000]
    assert again.read(12) == {**RECORD, "iteration": 12}
    assert (tmp_path / "runs/run-1.a_B/iterations/000012.json").is_file()
    assert os.listdir(tmp_path / "runs/run-1.a_B/partial") == []
    assert list_runs(tmp_path) == ["run-1.a_B"]


def test_a_record_is_a_readable_file_with_a_seal(tmp_path: Path):
    RunRecords(tmp_path, "r").commit(1, RECORD)
    document = json.loads((tmp_path / "runs/r/iterations/000001.json").read_text())
    assert {name: value for name, value in document.items() if name != "seal"} == RECORD
    assert document["seal"]["format"] == 1


def test_a_record_is_written_once(tmp_path: Path):
    records = RunRecords(tmp_path, "r")
    records.commit(1, RECORD)
    records.create_spec({"seed": 1})
    with pytest.raises(RecordExists, match=r"run r: .*000001\.json exists"):
        records.commit(1, {"other": 1})
    with pytest.raises(RecordExists, match=r"spec\.json exists"):
        records.create_spec({"seed": 2})
    assert (records.read(1), records.read_spec()) == (RECORD, {"seed": 1})


def test_a_metric_may_be_no_number(tmp_path: Path):
    records = RunRecords(tmp_path, "r")
    records.commit(1, {"a": math.inf, "b": math.nan})
    assert records.read(1)["a"] == math.inf
    assert math.isnan(records.read(1)["b"])


def test_what_cannot_be_a_record(tmp_path: Path):
    records = RunRecords(tmp_path, "r")
    with pytest.raises(ValueError, match="iteration -1"):
        records.commit(-1, {})
    with pytest.raises(ValueError, match="'seal'"):
        records.commit(1, {"seal": 1})
    with pytest.raises(TypeError):
        records.commit(1, {"path": tmp_path})
    with pytest.raises(StoreUnsupported):
        RunRecords("s3://bucket", "r")
    assert os.listdir(tmp_path) == []
    with pytest.raises(RecordMissing, match="run r has no record of iteration 5"):
        records.read(5)


@pytest.mark.parametrize("name", ["a", "A.b-c_1", "_x", "7", "x" * 100])
def test_good_run_names(name: str):
    assert validate_run_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "/a", "-a", ".a", "a b", "ä", "a\n", "x" * 101, "a\\b"])
def test_bad_run_names(tmp_path: Path, name: str):
    with pytest.raises(InvalidRunName, match="run name"):
        RunRecords(tmp_path, name)


def test_damage_is_found_in_every_case(tmp_path: Path):
    records = RunRecords(tmp_path, "r")
    records.commit(1, RECORD)
    path = tmp_path / "runs/r/iterations/000001.json"
    good = path.read_bytes()
    dice = random.Random(0)
    flips = [(where, bit) for where in range(len(good)) for bit in range(8)]
    for where, bit in dice.sample(flips, 500):
        data = bytearray(good)
        data[where] ^= 1 << bit
        path.unlink()
        path.write_bytes(data)
        with pytest.raises((RecordCorrupted, RecordFormatTooNew), match=r"000001\.json"):
            records.read(1)
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(RecordCorrupted):
            records.read(1)
    path.write_bytes(good)
    assert records.read(1) == RECORD
    path.rename(path.with_name("000002.json"))
    with pytest.raises(RecordCorrupted, match=r"000002\.json does not have its own sha256"):
        records.read(2)


def test_a_newer_format_says_so(tmp_path: Path):
    records = RunRecords(tmp_path, "r")
    records.commit(1, RECORD)
    path = tmp_path / "runs/r/iterations/000001.json"
    document = json.loads(path.read_text())
    document["seal"]["format"] = 2
    path.unlink()
    path.write_text(json.dumps(document))
    with pytest.raises(RecordFormatTooNew, match=r"record format 2.*up to format 1.*reads record format 2"):
        records.read(1)


class ReadOnlyFiles(LocalFiles):
    """A disk mounted read-only."""

    def make_folder(self, folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))


def test_a_read_only_store_says_so(tmp_path: Path):
    with pytest.raises(StoreReadOnly, match=rf"{tmp_path}/store cannot be written to"):
        RunRecords(tmp_path / "store", "r", files=ReadOnlyFiles()).create_spec({"seed": 1})


COMMITTER = """
import sys
from infra.runs import RecordExists, RunRecords

records = RunRecords(sys.argv[1], "r")
print("ready", flush=True)
sys.stdin.readline()
won = []
for iteration in range(100):
    try:
        records.commit(iteration, {"writer": sys.argv[2]})
        won.append(iteration)
    except RecordExists:
        pass
print(*won)
"""


def test_one_of_two_processes_commits(tmp_path: Path):
    names = ("first", "second")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", COMMITTER, str(tmp_path), name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    won = {name: writer.communicate(timeout=60)[0].split() for name, writer in zip(names, writers, strict=True)}
    records = RunRecords(tmp_path, "r")
    for name in names:
        assert all(records.read(int(iteration)) == {"writer": name} for iteration in won[name])
    assert sorted(map(int, won["first"] + won["second"])) == list(range(100))
