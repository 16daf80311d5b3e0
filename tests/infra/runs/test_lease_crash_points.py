"""Every operation by which a run changes hands, or its records change, fails or is the last one of its process.

Afterwards the run shows the old state or the new one, and a new process succeeds with the same call.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.runs.local_lease import LocalLease, acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.local_runs import LocalRuns
from infra.runs.records import RecordExists
from tests.infra.runs.leases import Armed, armed, somebody, state, successor, writer
from tests.infra.storage.faulty_files import FAULTS, Died, FaultyFiles

PASSING = [fault for fault in FAULTS if fault.endswith("once") or fault == "short write"]


def nothing(root: Path) -> None:
    """A store without this run."""


def a_released_one(root: Path) -> None:
    records, lease = used(root)
    assert records.last() == 2
    lease.release()


def a_dead_one(root: Path) -> None:
    _, lease = used(root)
    (lease.partial / "half-written").write_text("{")


def one_that_died_acquiring(root: Path) -> None:
    a_dead_one(root)
    files = FaultyFiles()
    successor(root / "count", files)
    published = next(n for n, operation in enumerate(files.trace, 1) if operation.name == "rename")
    with suppress(Died):
        successor(root, FaultyFiles(published, "dies after"))


def used(root: Path) -> tuple[LocalRecords, LocalLease]:
    """A run of three iterations, of which the last was made twice."""
    lease = successor(root)
    records = LocalRecords(root, "r", files=FaultyFiles(), lease=lease)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 2):
        records.commit(iteration, {"iteration": iteration})
    records.supersede(1)
    records.commit(2, {"iteration": 2, "try": 2})
    lease.pin("scores", "k")
    return records, lease


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", [nothing, a_released_one, a_dead_one, one_that_died_acquiring])
def test_a_run_is_acquired_or_not_at_every_operation(tmp_path: Path, before: Callable[[Path], None], fault: str):
    for number in itertools.count(1):
        root = tmp_path / str(number)
        before(root)
        records, files, me = state(root), FaultyFiles(number, fault), somebody()
        lease: LocalLease | None = None
        with suppress(OSError, Died):
            lease = acquire_lease(root, "r", files=files, identity=me, alive=lambda _: False)
        assert state(root) == records
        if lease is None and fault in PASSING:
            # The fault is over; who lives on and tries again is not kept away by what the first try has left.
            lease = acquire_lease(root, "r", identity=me, alive=lambda other, me=me: other == me)
            lease.check()
        next_one = successor(root)
        assert next_one.number > (0 if lease is None else lease.number)
        assert state(root) == records
        LocalRecords(root, "r", files=FaultyFiles(), lease=next_one).commit(3, {"lease": next_one.number})
        folders = os.listdir(next_one.folder.parent)
        assert [name for name in folders if name.isdigit()] == [next_one.folder.name]
        assert not any((next_one.folder.parent / name / "partial").exists() for name in folders if "ended" in name)
        if before is not nothing:
            kept = next_one.folder.parent / "000001.ended/superseded"
            assert os.listdir(kept) == ["000002.json"]
        if fault in PASSING:
            assert not [name for name in folders if name.startswith(".new")], "what failed was not cleaned up"
        if len(files.trace) < number:
            break
    assert number > 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_release_at_every_operation(tmp_path: Path, fault: str):
    for number in itertools.count(1):
        root = tmp_path / str(number)
        used(root)
        records, faulty = state(root), armed(root, number, fault)
        with suppress(OSError, Died):
            faulty.lease.release()
        operations = faulty.operations()
        if fault in PASSING:
            faulty.lease.release()
            assert faulty.lease.lost
            assert acquire_lease(root, "r", identity=somebody(), alive=lambda _: True).predecessors == ()
        assert successor(root).number > 2
        assert state(root) == records
        if operations < number:
            break


def supersede(records: LocalRecords) -> Any:
    return records.supersede(0)


def note(records: LocalRecords) -> Any:
    return records.note("rollbacks", {"to": 1})


def create_spec(records: LocalRecords) -> Any:
    return records.create_spec({"seed": 1})


def left_of_supersede(root: Path) -> bool:
    """The last record goes first, so what is left has no gap."""
    return LocalRecords(root, "r").iterations() in ([0, 1, 2], [0, 1], [0])


def left_of_note(root: Path) -> bool:
    return LocalRecords(root, "r").notes("rollbacks") in ([{"to": 9}], [{"to": 9}, {"to": 1}])


def left_of_create_spec(root: Path) -> bool:
    return LocalRecords(root, "r").read_spec() in (None, {"seed": 1})


def with_records(root: Path) -> None:
    records = writer(root)
    for iteration in range(3):
        records.commit(iteration, {"iteration": iteration})
    records.note("rollbacks", {"to": 9})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("change", "before", "left"),
    [
        (supersede, with_records, left_of_supersede),
        (note, with_records, left_of_note),
        (create_spec, nothing, left_of_create_spec),
    ],
)
def test_a_change_happens_or_not_at_every_operation(
    tmp_path: Path,
    change: Callable[[LocalRecords], Any],
    before: Callable[[Path], None],
    left: Callable[[Path], bool],
    fault: str,
):
    expected = tmp_path / "expected"
    before(expected)
    change(writer(expected))
    for number in itertools.count(1):
        root = tmp_path / str(number)
        before(root)
        faulty: Armed = armed(root, number, fault)
        with suppress(OSError, Died):
            change(faulty.records)
        assert left(root)
        operations = faulty.operations()
        if change is not note or state(root) != state(expected):
            with suppress(RecordExists):
                change(writer(root))
        assert state(root) == state(expected)
        if operations < number:
            break
    assert number > 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_superseded_record_is_never_lost(tmp_path: Path, fault: str):
    for number in itertools.count(1):
        root = tmp_path / str(number)
        with_records(root)
        faulty = armed(root, number, fault)
        with suppress(OSError, Died):
            faulty.records.supersede(0)
        operations = faulty.operations()
        for _ in range(2):
            writer(root).supersede(0)
        kept = sorted(path.name for path in (root / "runs/r/leases").glob("*.ended/superseded/*"))
        assert kept == ["000001.json", "000002.json"]
        if operations < number:
            break


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("first", [True, False])
def test_a_whole_run_appears_at_once_at_every_operation(tmp_path: Path, fault: str, first: bool):
    records = {0: {"iteration": 0}, 1: {"iteration": 1}}
    whole = ({"seed": 1}, [0, 1], list(records.values()), [], [])
    for number in itertools.count(1):
        root = tmp_path / str(number)
        if not first:
            LocalRuns(root, files=FaultyFiles()).create("another", {}, {})
        files = FaultyFiles(number, fault)
        with suppress(OSError, Died):
            LocalRuns(root, files=files).create("r", {"seed": 1}, records)
        assert state(root) in (whole, (None, [], [], [], []))
        assert ("r" in LocalRuns(root).names()) == (state(root) == whole)
        with suppress(RecordExists):
            LocalRuns(root, files=FaultyFiles()).create("r", {"seed": 1}, records)
        assert state(root) == whole
        writer(root).commit(2, {"iteration": 2})
        if fault in PASSING:
            assert not [name for name in os.listdir(root / "runs") if name.startswith(".new")]
        if len(files.trace) < number:
            break
    assert number > 15


@pytest.mark.parametrize("fault", FAULTS)
def test_a_taken_name_is_never_replaced(tmp_path: Path, fault: str):
    writer(tmp_path).create_spec({"seed": 1})
    for number in itertools.count(1):
        files = FaultyFiles(number, fault)
        with pytest.raises((RecordExists, OSError, Died)):
            LocalRuns(tmp_path, files=files).create("r", {"seed": 2}, {})
        assert state(tmp_path) == ({"seed": 1}, [], [], [], [])
        if len(files.trace) < number:
            break


USES: dict[str, Callable[[LocalLease], None]] = {
    "beat": LocalLease.beat,
    "pin": lambda lease: lease.pin("scores", "another"),
    "unpin_all": LocalLease.unpin_all,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("use", USES)
def test_a_lease_survives_what_fails_in_its_use(tmp_path: Path, use: str, fault: str):
    for number in itertools.count(1):
        root = tmp_path / str(number)
        faulty = armed(root, number, fault, before=lambda lease: lease.pin("scores", "k"))
        with suppress(OSError, Died):
            USES[use](faulty.lease)
        operations = faulty.operations()
        assert json.loads((faulty.lease.folder / "heartbeat").read_bytes())["beat"] in (0, 1)
        if operations < number:
            break
        if fault in PASSING:
            USES[use](faulty.lease)
            faulty.lease.check()
            pins = {"beat": ["scores.k"], "pin": ["scores.another", "scores.k"], "unpin_all": []}
            assert sorted(os.listdir(faulty.lease.folder / "pins")) == pins[use]
        assert len(successor(root).predecessors) == 1
    assert number > 1
