"""The records of a run on S3: written once, whole, and never taken for something else."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import pytest

from infra.runs.names import InvalidRunName
from infra.runs.records import RecordCorrupted, RecordExists, RecordFormatTooNew, RecordMissing
from infra.runs.s3_runs import S3Runs
from tests.infra.runs.bucket_runs import ADDRESS, collector_on, records_of, state, successor, writer
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects

RECORD = {
    "checkpoint": {"kind": "checkpoint", "digest": "ab"},
    "metrics": {"kl": 0.1 + 0.2},
    "note": "größer",
    "n": None,
}


def test_records_come_back_as_written() -> None:
    objects = MemoryObjects()
    records = writer(objects, "run-1.a_B")
    assert (records.last(), records.all(), records.read_spec()) == (None, [], None)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 12, 1_000_000):
        records.commit(iteration, {**RECORD, "iteration": iteration})
    again = records_of(objects, "run-1.a_B")
    assert (again.read_spec(), again.last()) == ({"seed": 1}, 1_000_000)
    assert [record["iteration"] for record in again.all()] == [0, 1, 12, 1_000_000]
    assert again.read(12) == {**RECORD, "iteration": 12}
    with pytest.raises(RecordMissing, match=r"run run-1\.a_B has no record of iteration 5 in s3://memory/store/runs"):
        again.read(5)


def test_a_record_is_written_once() -> None:
    records = writer(MemoryObjects())
    records.commit(1, RECORD)
    records.create_spec({"seed": 1})
    with pytest.raises(RecordExists, match=r"run r: s3://memory/store/runs/r/iterations/000001-.*\.json exists"):
        records.commit(1, {"other": 1})
    with pytest.raises(RecordExists, match=r"spec/.*\.json exists"):
        records.create_spec({"seed": 2})
    assert (records.read(1), records.read_spec()) == (RECORD, {"seed": 1})


def test_what_cannot_be_a_record() -> None:
    objects = MemoryObjects()
    records = writer(objects)
    before = dict(objects.content)
    with pytest.raises(ValueError, match="iteration -1"):
        records.commit(-1, {})
    with pytest.raises(ValueError, match="'seal'"):
        records.commit(1, {"seal": 1})
    with pytest.raises(TypeError):
        records.commit(1, {"path": objects})
    with pytest.raises(ValueError, match="notes of kind 'thoughts'"):
        records.note("thoughts", {})
    with pytest.raises(InvalidRunName):
        records_of(objects, "a/b")
    assert objects.content == before
    reader = records_of(objects)
    with pytest.raises(ValueError, match="run r is open for reading only: pass the lease of acquire_lease"):
        reader.commit(1, {})
    with pytest.raises(ValueError, match="is not one of the run"):
        records_of(objects, "r", successor(objects, "another"))


def test_damage_is_found_in_every_case() -> None:
    objects = MemoryObjects()
    records = writer(objects)
    records.commit(1, RECORD)
    for key in ("head.json", records._head.known().head.iterations[1]):
        good = objects.content[f"store/runs/r/{key}"]
        for where in range(0, len(good), 3):
            data = bytearray(good)
            data[where] ^= 1 << (where % 8)
            for bad in (bytes(data), good[:where]):
                objects.content[f"store/runs/r/{key}"] = bad
                with pytest.raises((RecordCorrupted, RecordFormatTooNew), match=key):
                    records_of(objects).read(1)
        objects.content[f"store/runs/r/{key}"] = good
    assert records_of(objects).read(1) == RECORD
    objects.remove([f"store/runs/r/{records._head.known().head.iterations[1]}"])
    with pytest.raises(RecordCorrupted, match="is gone, and run r names it"):
        records_of(objects).read(1)


def test_threads_of_one_holder_do_not_lose_the_run_to_each_other() -> None:
    objects = MemoryObjects()
    records, start = writer(objects), threading.Barrier(4)
    won: list[list[int]] = [[], [], [], []]

    def commit_all(number: int) -> None:
        start.wait(timeout=20)
        for iteration in range(60):
            try:
                records.commit(iteration, {"writer": number})
                won[number].append(iteration)
            except RecordExists:
                pass

    threads = [threading.Thread(target=commit_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(iteration for some in won for iteration in some) == list(range(60))
    assert all(records_of(objects).read(i) == {"writer": n} for n, some in enumerate(won) for i in some)


def test_superseded_records_leave_the_run_and_are_kept() -> None:
    objects = MemoryObjects()
    records = writer(objects)
    assert records.supersede(-1) == []
    for iteration in range(5):
        records.commit(iteration, {"iteration": iteration, "try": 1})
    first = records_of(objects).contents()
    assert records.supersede(2) == [4, 3]
    for iteration in (3, 4):
        records.commit(iteration, {"iteration": iteration, "try": 2})
    assert records.supersede(3) == [4]
    assert [record["try"] for record in records_of(objects).all()] == [1, 1, 1, 2]
    second = records_of(objects).contents()
    same = [number for number, mark in second.iterations.items() if first.iterations[number] == mark]
    assert (list(second.iterations), same) == ([0, 1, 2, 3], [0, 1, 2])
    objects.later(timedelta(days=3))
    collector = collector_on(objects)
    collector.remove(collector.leftovers())
    assert len([key for key in objects.content if "/iterations/" in key]) == 7, "what was superseded is kept"


def test_notes_are_numbered_and_kept() -> None:
    objects = MemoryObjects()
    records = writer(objects)
    assert records.notes("rollbacks") == []
    assert [records.note("rollbacks", {"to": to}) for to in (4, 2)] == [1, 2]
    assert records.note("divergences", {"metric": "kl", "value": math.inf}) == 1
    again = writer(objects)
    assert again.note("rollbacks", {"to": 1}) == 3
    assert [note["to"] for note in again.notes("rollbacks")] == [4, 2, 1]
    assert again.notes("divergences") == [{"metric": "kl", "value": math.inf}]
    place = again.note_place("rollbacks", 2)
    assert objects.content[place.removeprefix("s3://memory/")].startswith(b'{\n "to": 2')


def test_a_run_can_be_created_whole() -> None:
    objects = MemoryObjects()
    runs = S3Runs(ADDRESS, objects, threads=4)
    runs.create("r", {"seed": 1}, {0: {"iteration": 0}, 3: {"iteration": 3}})
    assert state(objects) == ({"seed": 1}, [0, 3], [{"iteration": 0}, {"iteration": 3}], [], [])
    with pytest.raises(RecordExists, match=r"run r exists in s3://memory/store: choose another name"):
        runs.create("r", {"seed": 2}, {})
    with pytest.raises(InvalidRunName):
        runs.create("../r", {"seed": 2}, {})
    writer(objects).commit(4, {"iteration": 4})
    writer(objects, "never-started")
    writer(objects, "a").create_spec({})
    assert (runs.names(), runs.names(started=False)) == (["a", "r"], ["a", "never-started", "r"])


def test_what_was_read_once_is_not_read_again() -> None:
    objects = FaultyObjects(MemoryObjects())
    records = writer(objects)
    records.create_spec({"seed": 1})
    records.commit(0, RECORD)
    start = len(objects.trace)
    for _ in range(5):
        assert (records.read(0), records.last(), records.read_spec()) == (RECORD, 0, {"seed": 1})
        assert records.notes("rollbacks") == []
    assert len(objects.trace) == start
    records.commit(1, RECORD)
    assert [call.split()[0] for call in objects.trace[start:]] == ["write", "replace"]
