"""The records of a run: written once, whole, and never taken for something else. The contract of every store."""

from __future__ import annotations

import json
import math
import random
import re
import threading

import pytest

from infra.runs.records import (
    InvalidRunName,
    RecordCorrupted,
    RecordExists,
    RecordFormatTooNew,
    RecordMissing,
    validate_run_name,
)
from tests.infra.places import NO_NOTES, Place
from tests.waiting import LONG_S

RECORD = {
    "checkpoint": {"kind": "checkpoint", "digest": "ab"},
    "metrics": {"kl": 0.1 + 0.2},
    "note": "größer",
    "n": None,
}


def test_records_come_back_as_written(place: Place):
    records = place.writer(run="run-1.a_B")
    assert (records.last(), records.all(), records.read_spec()) == (None, [], None)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 12, 1_000_000):
        records.commit(iteration, {**RECORD, "iteration": iteration})
    again = place.records("run-1.a_B")
    assert (again.read_spec(), again.last()) == ({"seed": 1}, 1_000_000)
    assert [record["iteration"] for record in again.all()] == [0, 1, 12, 1_000_000]
    assert again.read(12) == {**RECORD, "iteration": 12}
    missing = rf"run run-1\.a_B has no record of iteration 5 in {place.address}/runs"
    with pytest.raises(RecordMissing, match=missing):
        again.read(5)
    assert place.runs().names() == ["run-1.a_B"]


def test_a_record_is_written_once(place: Place):
    records = place.writer()
    records.commit(1, RECORD)
    records.create_spec({"seed": 1})
    with pytest.raises(RecordExists, match=rf"run r: {place.address}/runs/r/iterations/000001.*\.json exists"):
        records.commit(1, {"other": 1})
    with pytest.raises(RecordExists, match=r"spec.*\.json exists"):
        records.create_spec({"seed": 2})
    assert (records.read(1), records.read_spec()) == (RECORD, {"seed": 1})


def test_a_metric_may_be_no_number(place: Place):
    records = place.writer()
    records.commit(1, {"a": math.inf, "b": math.nan})
    found = place.records().read(1)
    assert found["a"] == math.inf
    assert math.isnan(found["b"])


def test_what_cannot_be_a_record(place: Place):
    records = place.writer()
    with pytest.raises(ValueError, match="iteration -1"):
        records.commit(-1, {})
    with pytest.raises(ValueError, match="'seal'"):
        records.commit(1, {"seal": 1})
    with pytest.raises(TypeError):
        records.commit(1, {"path": place})
    with pytest.raises(ValueError, match="notes of kind 'thoughts'"):
        records.note("thoughts", {})
    assert place.state() == (None, [], [], *NO_NOTES)
    assert place.litter() == []


@pytest.mark.parametrize("name", ["a", "A.b-c_1", "_x", "7", "x" * 100])
def test_good_run_names(name: str):
    assert validate_run_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "/a", "-a", ".a", "a b", "ä", "a\n", "x" * 101, "a\\b"])
def test_bad_run_names(place: Place, name: str):
    with pytest.raises(InvalidRunName, match="run name"):
        place.records(name)


def test_writing_needs_the_lease_of_this_run(place: Place):
    records = place.records()
    for write in (
        lambda: records.create_spec({}),
        lambda: records.commit(1, {}),
        lambda: records.supersede(1),
        lambda: records.note("rollbacks", {}),
    ):
        with pytest.raises(ValueError, match="run r is open for reading only: pass the lease of acquire_lease"):
            write()
    assert place.runs().names(started=False) == []
    with pytest.raises(ValueError, match="is not one of the run"):
        place.records(lease=place.successor(run="another"))


def test_damage_is_found_in_every_case(place: Place):
    place.writer().commit(1, RECORD)
    dice = random.Random(0)
    for document in (place.document("iterations/1"), *place.index()):
        good = document.read()

        def complain(bad: bytes, name: str = re.escape(document.name), write=document.write) -> None:
            write(bad)
            with pytest.raises((RecordCorrupted, RecordFormatTooNew), match=name):
                place.records().read(1)

        flips = [(where, bit) for where in range(len(good)) for bit in range(8)]
        for where, bit in dice.sample(flips, 500):
            complain(good[:where] + bytes([good[where] ^ 1 << bit]) + good[where + 1 :])
        for length in range(len(good)):
            complain(good[:length])
        document.write(good)
        assert place.records().read(1) == RECORD


def test_a_newer_format_says_so(place: Place):
    place.writer().commit(1, RECORD)
    document = place.document("iterations/1")
    content = json.loads(document.read())
    content["seal"]["format"] = 2
    document.write(json.dumps(content).encode())
    with pytest.raises(RecordFormatTooNew, match=r"record format 2.*up to format 1.*reads record format 2"):
        place.records().read(1)


def test_threads_of_one_holder_do_not_lose_the_run_to_each_other(place: Place):
    records, start, writers = place.writer(), threading.Barrier(4), range(4)
    won: list[list[int]] = [[] for _ in writers]

    def commit_all(number: int) -> None:
        start.wait(timeout=LONG_S)
        for iteration in range(100):
            try:
                records.commit(iteration, {"writer": number})
                won[number].append(iteration)
            except RecordExists:
                pass

    threads = [threading.Thread(target=commit_all, args=(number,)) for number in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LONG_S)
    assert sorted(iteration for some in won for iteration in some) == list(range(100))
    assert all(place.records().read(i) == {"writer": n} for n, some in enumerate(won) for i in some)


def test_superseded_records_leave_the_run_and_are_kept(place: Place):
    records = place.writer()
    assert records.supersede(-1) == []
    for iteration in range(5):
        records.commit(iteration, {"iteration": iteration, "try": 1})
    first = place.records().contents()
    assert records.supersede(2) == [4, 3]
    assert records.iterations() == [0, 1, 2]
    for iteration in (3, 4):
        records.commit(iteration, {"iteration": iteration, "try": 2})
    assert records.supersede(3) == [4]
    assert [record["try"] for record in place.records().all()] == [1, 1, 1, 2]
    second = place.records().contents()
    same = [number for number, mark in second.iterations.items() if first.iterations[number] == mark]
    assert (list(second.iterations), same) == ([0, 1, 2, 3], [0, 1, 2])
    place.successor()
    place.clear_up()
    assert place.superseded() == [3, 4, 4], "what was superseded is kept"


def test_notes_are_numbered_and_kept(place: Place):
    records = place.writer()
    assert records.notes("rollbacks") == []
    assert [records.note("rollbacks", {"to": to}) for to in (4, 2)] == [1, 2]
    assert records.note("divergences", {"metric": "kl", "value": math.inf}) == 1
    again = place.writer()
    assert again.note("rollbacks", {"to": 1}) == 3
    assert [note["to"] for note in again.notes("rollbacks")] == [4, 2, 1]
    assert again.notes("divergences") == [{"metric": "kl", "value": math.inf}]
    assert place.content(again.last_note_place("rollbacks")).startswith(b'{\n "to": 1')


@pytest.mark.parametrize("kind", ["rollbacks", "divergences", "reruns", "tracking"])
def test_a_damaged_note_can_be_moved_away_as_its_remedy_says(place: Place, kind: str):
    writer = place.writer()
    for number in (1, 2, 3):
        writer.note(kind, {"number": number})
    for at in (1, 3):
        place.document(f"{kind}/{at}").write(b"{}")
        with pytest.raises(RecordCorrupted, match="move it away"):
            place.records().notes(kind)
        place.document(f"{kind}/{at}").write(None)
    records = place.records()
    listed = records.contents().notes[kind]
    assert [note for note in records.marked(listed) if note is not None] == records.notes(kind) == [{"number": 2}]
    assert place.content(records.last_note_place(kind)).startswith(b'{\n "number": 2')
    again = place.writer()
    again.note(kind, {"number": 4})
    assert place.records().notes(kind) == [{"number": 2}, {"number": 4}]
    assert place.content(again.last_note_place(kind)).startswith(b'{\n "number": 4')


def test_a_record_that_is_gone_is_no_note_that_was_moved_away(place: Place):
    place.writer().commit(1, RECORD)
    marks = list(place.records().contents().iterations.values())
    document = place.document("iterations/1")
    document.write(None)
    if place.index():  # names it still
        with pytest.raises(RecordCorrupted, match="is gone, and run r names it"):
            place.records().marked(marks)
    else:
        assert place.records().marked(marks) == [None]


def test_a_run_can_be_created_whole(place: Place):
    records, runs = {0: {"iteration": 0}, 3: {"iteration": 3}}, place.runs()
    runs.create("r", {"seed": 1}, records)
    whole = ({"seed": 1}, [0, 3], [{"iteration": 0}, {"iteration": 3}], *NO_NOTES)
    assert place.state() == whole
    with pytest.raises(RecordExists, match=rf"run r exists in {place.address}.*: choose another name"):
        runs.create("r", {"seed": 2}, {})
    with pytest.raises(InvalidRunName):
        runs.create("../r", {"seed": 2}, {})
    with pytest.raises(ValueError, match="'seal'"):
        runs.create("q", {}, {1: {"seal": 1}})
    with pytest.raises(ValueError, match="a run has no notes of kind 'others'"):
        runs.create("q", {}, {}, {"others": [{}]})
    assert (place.state(), runs.names(started=False)) == (whole, ["r"])
    place.writer().commit(4, {"iteration": 4})
    assert place.state()[:2] == ({"seed": 1}, [0, 3, 4])


def test_a_run_can_be_created_with_notes(place: Place):
    place.runs().create("r", {"seed": 1}, {0: RECORD}, {"rollbacks": [{"to": 4}, {"to": 2}], "divergences": []})
    assert place.state() == ({"seed": 1}, [0], [RECORD], [{"to": 4}, {"to": 2}], *NO_NOTES[1:])
    assert place.writer().note("rollbacks", {"to": 1}) == 3
    assert place.writer().note("divergences", {}) == 1
    assert place.state()[3:] == ([{"to": 4}, {"to": 2}, {"to": 1}], [{}], *NO_NOTES[2:])


def test_only_started_runs_are_listed(place: Place):
    runs = place.runs()
    assert runs.names() == []
    place.writer(run="never-started")
    runs.create("b", {}, {})
    place.writer(run="a").create_spec({})
    place.writer(run="c").commit(0, RECORD)
    assert (runs.names(), runs.names(started=False)) == (["a", "b", "c"], ["a", "b", "c", "never-started"])


def test_a_lost_or_damaged_spec_is_written_again(place: Place):
    records = place.writer()
    records.create_spec({"seed": 1})
    good = place.document("spec").read()
    place.document("spec").write(None)
    assert place.records().read_spec() is None
    records.restore_spec({"seed": 1})
    assert place.records().read_spec() == {"seed": 1}
    place.document("spec").write(good[:-3])
    with pytest.raises(RecordCorrupted, match=r"`ppoflow fsck r --repair` writes it again"):
        place.records().read_spec()
    records.restore_spec({"seed": 1})
    assert place.records().read_spec() == {"seed": 1}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("iterations/1", "`ppoflow fsck r --repair` takes iteration 1 and those after it out of the run"),
        ("rollbacks/1", "the learning rates of the iterations after it depend on it"),
        ("divergences/1", "nothing depends on it"),
        ("tracking/1", "the run gets a new MLflow run"),
    ],
)
def test_each_kind_of_document_has_its_own_remedy(place: Place, name: str, remedy: str):
    writer = place.writer()
    writer.commit(1, RECORD)
    writer.note("rollbacks", {})
    writer.note("divergences", {})
    writer.note("tracking", {})
    place.document(name).write(b"{}")
    records, kind = place.records(), name.partition("/")[0]
    with pytest.raises(RecordCorrupted) as refusal:
        records.read(1) if kind == "iterations" else records.notes(kind)
    assert remedy in str(refusal.value)
