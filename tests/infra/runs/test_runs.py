"""The records of a run: written once, whole, and never taken for something else."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import threading
from pathlib import Path

import pytest

from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.local_runs import LocalRuns
from infra.runs.records import (
    InvalidRunName,
    RecordCorrupted,
    RecordExists,
    RecordFormatTooNew,
    RecordMissing,
    validate_run_name,
)
from infra.storage.filesystem import LocalFiles, StoreReadOnly, StoreUnsupported
from tests.infra.runs.leases import state, successor, writer

RECORD = {
    "checkpoint": {"kind": "checkpoint", "digest": "ab"},
    "metrics": {"kl": 0.1 + 0.2},
    "note": "größer",
    "n": None,
}


def test_records_come_back_as_written(tmp_path: Path):
    records = writer(tmp_path, run="run-1.a_B")
    assert (records.last(), records.all(), records.read_spec()) == (None, [], None)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 12, 1_000_000):
        records.commit(iteration, {**RECORD, "iteration": iteration})
    again = LocalRecords(f"file://{tmp_path}", "run-1.a_B")
    assert again.read_spec() == {"seed": 1}
    assert again.last() == 1_000_000
    assert [record["iteration"] for record in again.all()] == [0, 1, 12, 1_000_000]
    assert again.read(12) == {**RECORD, "iteration": 12}
    assert (tmp_path / "runs/run-1.a_B/iterations/000012.json").is_file()
    assert os.listdir(tmp_path / "runs/run-1.a_B/leases/000001/partial") == []
    assert LocalRuns(tmp_path).names() == ["run-1.a_B"]


def test_a_record_is_a_readable_file_with_a_seal(tmp_path: Path):
    writer(tmp_path).commit(1, RECORD)
    document = json.loads((tmp_path / "runs/r/iterations/000001.json").read_text())
    assert {name: value for name, value in document.items() if name != "seal"} == RECORD
    assert document["seal"]["format"] == 1


def test_a_record_is_written_once(tmp_path: Path):
    records = writer(tmp_path)
    records.commit(1, RECORD)
    records.create_spec({"seed": 1})
    with pytest.raises(RecordExists, match=r"run r: .*000001\.json exists"):
        records.commit(1, {"other": 1})
    with pytest.raises(RecordExists, match=r"spec\.json exists"):
        records.create_spec({"seed": 2})
    assert (records.read(1), records.read_spec()) == (RECORD, {"seed": 1})


def test_a_metric_may_be_no_number(tmp_path: Path):
    records = writer(tmp_path)
    records.commit(1, {"a": math.inf, "b": math.nan})
    assert records.read(1)["a"] == math.inf
    assert math.isnan(records.read(1)["b"])


def test_what_cannot_be_a_record(tmp_path: Path):
    records = writer(tmp_path)
    with pytest.raises(ValueError, match="iteration -1"):
        records.commit(-1, {})
    with pytest.raises(ValueError, match="'seal'"):
        records.commit(1, {"seal": 1})
    with pytest.raises(TypeError):
        records.commit(1, {"path": tmp_path})
    with pytest.raises(ValueError, match="notes of kind 'thoughts'"):
        records.note("thoughts", {})
    with pytest.raises(StoreUnsupported):
        LocalRecords("s3://bucket", "r")
    assert os.listdir(tmp_path / "runs/r") == ["leases"]
    assert os.listdir(tmp_path / "runs/r/leases/000001/partial") == []
    with pytest.raises(RecordMissing, match="run r has no record of iteration 5"):
        records.read(5)


@pytest.mark.parametrize("name", ["a", "A.b-c_1", "_x", "7", "x" * 100])
def test_good_run_names(name: str):
    assert validate_run_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "/a", "-a", ".a", "a b", "ä", "a\n", "x" * 101, "a\\b"])
def test_bad_run_names(tmp_path: Path, name: str):
    with pytest.raises(InvalidRunName, match="run name"):
        LocalRecords(tmp_path, name)


def test_damage_is_found_in_every_case(tmp_path: Path):
    records = writer(tmp_path)
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
    records = writer(tmp_path)
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
        acquire_lease(tmp_path / "store", "r", files=ReadOnlyFiles())
    lease = acquire_lease(tmp_path / "store", "r")
    with pytest.raises(StoreReadOnly, match=rf"{tmp_path}/store cannot be written to"):
        LocalRecords(tmp_path / "store", "r", files=ReadOnlyFiles(), lease=lease).commit(1, RECORD)


def test_writing_needs_the_lease_of_this_run(tmp_path: Path):
    records = LocalRecords(tmp_path, "r")
    for write in (
        lambda: records.create_spec({}),
        lambda: records.commit(1, {}),
        lambda: records.supersede(1),
        lambda: records.note("rollbacks", {}),
    ):
        with pytest.raises(ValueError, match="run r is open for reading only: pass the lease of acquire_lease"):
            write()
    assert os.listdir(tmp_path) == []
    for other in (successor(tmp_path, run="another"), successor(tmp_path / "elsewhere")):
        with pytest.raises(ValueError, match="is not one of the run"):
            LocalRecords(tmp_path, "r", lease=other)


def test_one_of_two_threads_commits(tmp_path: Path):
    records, start = writer(tmp_path, LocalFiles()), threading.Barrier(2)
    won: dict[str, list[int]] = {"first": [], "second": []}

    def commit_all(name: str) -> None:
        start.wait(timeout=20)
        for iteration in range(100):
            try:
                records.commit(iteration, {"writer": name})
                won[name].append(iteration)
            except RecordExists:
                pass

    threads = [threading.Thread(target=commit_all, args=(name,)) for name in won]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for name, iterations in won.items():
        assert all(records.read(iteration) == {"writer": name} for iteration in iterations)
    assert sorted(won["first"] + won["second"]) == list(range(100))


def test_superseded_records_leave_the_run_and_are_kept(tmp_path: Path):
    records = writer(tmp_path)
    assert records.supersede(-1) == []
    for iteration in range(5):
        records.commit(iteration, {"iteration": iteration, "try": 1})
    assert records.supersede(2) == [4, 3]
    assert records.iterations() == [0, 1, 2]
    for iteration in (3, 4):
        records.commit(iteration, {"iteration": iteration, "try": 2})
    assert records.supersede(3) == [4]
    assert [record["try"] for record in records.all()] == [1, 1, 1, 2]
    kept = tmp_path / "runs/r/leases/000001/superseded"
    assert sorted(os.listdir(kept)) == ["000003.json", "000004-2.json", "000004.json"]
    assert [json.loads((kept / name).read_text())["try"] for name in ("000004.json", "000004-2.json")] == [1, 2]
    successor(tmp_path)
    ended = tmp_path / "runs/r/leases/000001.ended"
    assert sorted(os.listdir(ended / "superseded")) == ["000003.json", "000004-2.json", "000004.json"]
    assert sorted(os.listdir(ended)) == ["heartbeat", "holder.json", "pins", "superseded"]


def test_notes_are_numbered_and_kept(tmp_path: Path):
    records = writer(tmp_path)
    assert records.notes("rollbacks") == []
    assert [records.note("rollbacks", {"to": to}) for to in (4, 2)] == [1, 2]
    assert records.note("divergences", {"metric": "kl", "value": math.inf}) == 1
    again = writer(tmp_path)
    assert again.note("rollbacks", {"to": 1}) == 3
    assert [note["to"] for note in again.notes("rollbacks")] == [4, 2, 1]
    assert again.notes("divergences") == [{"metric": "kl", "value": math.inf}]
    (tmp_path / "runs/r/rollbacks/000002.json").rename(tmp_path / "runs/r/rollbacks/000009.json")
    with pytest.raises(RecordCorrupted, match=r"000009\.json does not have its own sha256"):
        again.notes("rollbacks")


def test_a_run_can_be_created_whole(tmp_path: Path):
    records = {0: {"iteration": 0}, 3: {"iteration": 3}}
    LocalRuns(tmp_path).create("r", {"seed": 1}, records)
    assert state(tmp_path) == ({"seed": 1}, [0, 3], [{"iteration": 0}, {"iteration": 3}], [], [])
    with pytest.raises(RecordExists, match=r"run r exists in .*: choose another name"):
        LocalRuns(tmp_path).create("r", {"seed": 2}, {})
    with pytest.raises(InvalidRunName):
        LocalRuns(tmp_path).create("../r", {"seed": 2}, {})
    with pytest.raises(ValueError, match="'seal'"):
        LocalRuns(tmp_path).create("q", {}, {1: {"seal": 1}})
    assert os.listdir(tmp_path / "runs") == ["r"]
    writer(tmp_path).commit(4, {"iteration": 4})
    assert state(tmp_path)[:2] == ({"seed": 1}, [0, 3, 4])


def test_only_started_runs_are_listed(tmp_path: Path):
    assert LocalRuns(tmp_path).names() == []
    writer(tmp_path, run="never-started")
    (tmp_path / "runs/.new-1").mkdir()
    LocalRuns(tmp_path).create("b", {}, {})
    writer(tmp_path, run="a").create_spec({})
    assert LocalRuns(tmp_path).names() == ["a", "b"]
