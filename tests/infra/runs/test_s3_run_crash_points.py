"""Every call by which a run on S3 changes hands, or changes, fails or is the last one of its process.

Afterwards the run shows the old state or the new one, and a new process succeeds with the same call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from infra.gc.hold import collecting_paused
from infra.runs.records import RecordExists
from infra.runs.s3_lease import S3Lease, acquire_lease
from infra.runs.s3_records import S3Records
from infra.runs.s3_runs import S3Runs
from infra.storage.objects import StoreUnavailable
from tests.infra.runs.bucket_runs import ADDRESS, ROOT, collector_on, look, put, records_of, state, successor, writer
from tests.infra.runs.leases import somebody
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.s3.faulty_objects import FAULTS, FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects

PASSING = ("fails before", "fails after")
X, Y, Z = ("scores", "x"), ("scores", "y"), ("scores", "z")
LOSSES = (StoreUnavailable, Died)


class FutureFaults(FaultyObjects):
    """A bucket without faults until it is armed."""

    def __init__(self, real: MemoryObjects, fault: str) -> None:
        super().__init__(real, 0, fault)

    def arm(self, number: int) -> int:
        """Let call `number` from now on (counted from 1) be the one that goes wrong; how many there were."""
        self._at = len(self.trace) + number
        return len(self.trace)


def used() -> MemoryObjects:
    """A run of three iterations, of which the last was made twice, and whose holder has died."""
    objects = MemoryObjects()
    lease = successor(objects)
    records = records_of(objects, lease=lease)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 2):
        records.commit(iteration, {"iteration": iteration})
    records.supersede(1)
    records.commit(2, {"iteration": 2, "try": 2})
    lease.pin("scores", "k")
    return objects


def released() -> MemoryObjects:
    """The same, let go."""
    objects = used()
    successor(objects).release()
    return objects


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", [MemoryObjects, used, released])
def test_a_run_is_acquired_or_not_at_every_call(before: Callable[[], MemoryObjects], fault: str) -> None:
    for number in itertools.count(1):
        objects = before()
        records, faulty, me = state(objects), FaultyObjects(objects, number, fault), somebody()
        lease: S3Lease | None = None
        with suppress(*LOSSES):
            lease = acquire_lease(ROOT, "r", objects=faulty, identity=me, alive=lambda _: False)
        assert state(objects) == records
        if lease is None and fault in PASSING:
            # The fault is over; who lives on and tries again is not kept away by what the first try has left.
            lease = acquire_lease(ROOT, "r", objects=objects, identity=me, alive=lambda other, me=me: other == me)
            lease.check()
        next_one = successor(objects)
        assert next_one.number > (0 if lease is None else lease.number)
        assert state(objects) == records
        records_of(objects, lease=next_one).commit(3, {"lease": next_one.number})
        clear_up(objects)
        assert {key.split("/")[4] for key in objects.content if "/leases/" in key} == {
            next_one._tenure.folder.removeprefix("leases/")
        }
        next_one.check()
        if len(faulty.trace) < number:
            break
    assert number > 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_release_at_every_call(fault: str) -> None:
    for number in itertools.count(1):
        objects = used()
        faulty = FutureFaults(objects, fault)
        lease, records = successor(faulty), state(objects)
        start = faulty.arm(number)
        with suppress(*LOSSES):
            lease.release()
        calls = len(faulty.trace) - start
        if fault in PASSING:
            lease.release()
            assert lease.lost
            again = acquire_lease(ROOT, "r", objects=objects, identity=somebody(), alive=lambda _: True)
            assert again.predecessors == ()
        assert successor(objects).number > 2
        assert state(objects) == records
        if calls < number:
            break


def create_spec(records: S3Records) -> Any:
    return records.create_spec({"seed": 2})


CHANGES: dict[str, tuple[Callable[[], MemoryObjects], Callable[[S3Records], Any]]] = {
    "create_spec": (MemoryObjects, create_spec),
    "commit": (used, lambda records: records.commit(3, {"iteration": 3})),
    "supersede": (used, lambda records: records.supersede(0)),
    "note": (used, lambda records: records.note("rollbacks", {"to": 1})),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_happens_or_not_at_every_call(change: str, fault: str) -> None:
    before, act = CHANGES[change]
    done = before()
    act(writer(done))
    for number in itertools.count(1):
        objects = before()
        faulty = FutureFaults(objects, fault)
        records, old = writer(faulty), state(objects)
        start = faulty.arm(number)
        failed = False
        try:
            act(records)
        except LOSSES:
            failed = True
        assert state(objects) in ((old, state(done)) if failed else (state(done),))
        if failed and fault in PASSING and state(objects) == old:
            act(records)
            assert state(objects) == state(done), "the same process can go on"
        if state(objects) == old:
            act(writer(objects))
        elif change in ("create_spec", "commit"):
            with pytest.raises(RecordExists):
                act(writer(objects))
        assert state(objects) == state(done)
        clear_up(objects)
        assert state(objects) == state(done)
        if len(faulty.trace) - start < number:
            assert not failed
            break
    assert number > 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_is_created_whole_or_not_at_all_at_every_call(fault: str) -> None:
    records = {number: {"iteration": number} for number in range(3)}
    for number in itertools.count(1):
        objects = MemoryObjects()
        faulty = FaultyObjects(objects, number, fault)
        failed = False
        try:
            S3Runs(ADDRESS, faulty).create("r", {"seed": 1}, records)
        except LOSSES:
            failed = True
        whole = ({"seed": 1}, [0, 1, 2], list(records.values()), [], [])
        assert state(objects) in (((None, [], [], [], []), whole) if failed else (whole,))
        if state(objects) != whole:
            assert S3Runs(ADDRESS, objects).names(started=False) in ([], ["r"])
            S3Runs(ADDRESS, objects).create("r", {"seed": 1}, records)
        clear_up(objects)
        assert state(objects) == whole
        assert len(objects.content) == 5, "what a broken try left is removed in time"
        if len(faulty.trace) < number:
            break
    assert number > 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pin_holds_once_it_returned_at_every_call(fault: str) -> None:
    for number in itertools.count(1):
        objects = MemoryObjects()
        faulty = FutureFaults(objects, fault)
        lease = successor(faulty)
        start = faulty.arm(number)
        pinned = False
        with suppress(*LOSSES):
            lease.pin(*X)
            pinned = True
            lease.pin(*Y)
            pinned = False
            lease.unpin_all()
        found = collector_on(objects).pinned()
        assert X in found or not pinned
        if fault in PASSING:
            lease.unpin_all()
            assert collector_on(objects).pinned() == set()
        if len(faulty.trace) - start < number:
            break
    assert number > 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_collection_leaves_each_artifact_whole_or_gone_at_every_call(fault: str) -> None:
    for number in itertools.count(1):
        objects = MemoryObjects()
        for name in (X, Y, Z):
            put(objects, name)
        lease = successor(objects)
        lease.pin(*Y)
        faulty = FaultyObjects(objects, number, fault)
        removed = None
        with suppress(*LOSSES):
            removed = [one.key for one in collector_on(faulty).collect([X, Y, Z], lambda: {Z})]
        assert look(objects, X) in (b"12345", None)
        assert removed is None or (removed, look(objects, X)) == (["x"], None)
        assert [look(objects, name) for name in (Y, Z)] == [b"12345"] * 2
        assert collector_on(objects).collect([Y, Z], lambda: {Z}) == []
        collector_on(objects).collect([X], set)
        assert look(objects, X) is None
        lease.release()
        assert [one.key for one in collector_on(objects).collect([Y, Z], set)] == ["y", "z"]
        put(objects, X, "1" * 32)
        clear_up(objects)
        assert [key for key in objects.content if key.endswith("data.bin")] == [f"store/scores/x/{'1' * 32}/data.bin"]
        if len(faulty.trace) < number:
            break
    assert number > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pause_that_is_not_ended_is_over_in_an_hour(fault: str) -> None:
    for number in itertools.count(1):
        objects = MemoryObjects()
        put(objects, X)
        faulty = FaultyObjects(objects, number, fault)
        with suppress(*LOSSES), collecting_paused(ROOT, objects=faulty):
            assert collector_on(objects).collect([X], set) == []
            assert look(objects, X) == b"12345"
        objects.later(timedelta(minutes=61))
        assert [one.key for one in collector_on(objects).collect([X], set)] == ["x"]
        clear_up(objects)
        assert not [key for key in objects.content if "/gc/" in key]
        if len(faulty.trace) < number:
            break


def clear_up(objects: MemoryObjects) -> None:
    """What a collector does days later."""
    objects.later(timedelta(days=2))
    collector = collector_on(objects)
    collector.remove(collector.leftovers())
    assert collector.leftovers() == []
