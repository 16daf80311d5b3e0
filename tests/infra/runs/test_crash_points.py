"""Every call by which a run changes hands, or changes, fails or is the last one of its process; in any store.

Afterwards the run shows the old state or the new one, and a new process succeeds with the same call.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from infra.runs.lease import Lease
from infra.runs.local_lease import LocalLease
from infra.runs.records import RecordExists, RunRecords
from tests.infra.places import NO_NOTES, Bucket, Folder, Place
from tests.infra.runs.leases import somebody
from tests.infra.storage.faulty_files import ALIKE, Died

NewPlace = Callable[[], Place]
NOTHING: tuple[object, ...] = (None, [], [], *NO_NOTES)
RECORD = {"iteration": 3, "metrics": {"kl": 0.1, "score": float("inf")}, "refs": ["ä", None, True]}
X, Y = ("scores", "x"), ("scores", "y")

pytestmark = pytest.mark.parametrize(
    ("new_place", "fault"),
    [
        pytest.param(kind, fault, marks=[pytest.mark.thorough] if fault in ALIKE else [])
        for kind in (Folder, Bucket)
        for fault in kind.faults
    ],
    indirect=["new_place"],
    ids=lambda value: value if isinstance(value, str) else value.__name__.lower(),
)


def used(place: Place, run: str = "r") -> Lease:
    """A run of three iterations, of which the last was made twice; its holder's lease."""
    lease = place.successor(run=run)
    records = place.records(run, lease=lease)
    records.create_spec({"seed": 1})
    for iteration in (0, 1, 2):
        records.commit(iteration, {"iteration": iteration})
    records.supersede(1)
    records.commit(2, {"iteration": 2, "try": 2})
    records.note("rollbacks", {"to": 9})
    lease.pin("scores", "k")
    return lease


def nothing(place: Place) -> None:
    """Before: a store without this run."""


def a_released_one(place: Place) -> None:
    used(place).release()


def a_dead_one(place: Place) -> None:
    lease = used(place)
    if isinstance(lease, LocalLease):
        (lease.partial / "half-written").write_text("{")


def one_that_died_acquiring(place: Place) -> None:
    """Right after its lease had got its number."""
    for run in ("another", "r"):
        used(place, run)
    seam = place.seam()
    place.successor(seam, "another")
    published = next(n for n, call in enumerate(seam.trace, 1) if "rename" in str(call) or "replace" in str(call))
    with suppress(Died):
        place.successor(place.seam(published, "dies after"))


@pytest.mark.parametrize("before", [nothing, a_released_one, a_dead_one, one_that_died_acquiring])
def test_a_run_is_acquired_or_not(new_place: NewPlace, before: Callable[[Place], None], fault: str):
    for number in itertools.count(1):
        place = new_place()
        before(place)
        records, seam, me = place.state(), place.seam(number, fault), somebody()
        lease: Lease | None = None
        with suppress(*place.errors):
            lease = place.acquire(seam=seam, identity=me, alive=lambda _: False)
        assert place.state() == records
        if lease is None and fault in place.passing:
            # The fault is over; who lives on and tries again is not kept away by what the first try has left.
            lease = place.acquire(identity=me, alive=lambda other, me=me: other == me)
            lease.check()
        next_one = place.successor()
        assert next_one.number > (0 if lease is None else lease.number)
        assert place.state() == records
        place.records(lease=next_one).commit(3, {"lease": next_one.number})
        assert place.in_force() == [next_one.number]
        assert place.superseded() == ([] if before is nothing else [2])
        if place.one_step or fault not in place.passing:
            place.clear_up()
        assert place.litter() == [], "what failed was not cleaned up"
        next_one.check()
        if len(seam.trace) < number:
            assert number > 2  # else nothing was interrupted
            break
    assert number > place.acquires_in


def test_a_release(new_place: NewPlace, fault: str):
    for number in itertools.count(1):
        place = new_place()
        used(place)
        seam = place.seam(0, fault)
        lease, records = place.successor(seam), place.state()
        start = seam.arm(number)
        with suppress(*place.errors):
            lease.release()
        calls = len(seam.trace) - start
        if fault in place.passing:
            lease.release()
            assert lease.lost
            assert place.acquire(identity=somebody(), alive=lambda _: True).predecessors == ()
        assert place.successor().number > 2
        assert place.state() == records
        if calls < number:
            break


CHANGES: dict[str, tuple[Callable[[Place], Any], Callable[[RunRecords], Any]]] = {
    "create_spec": (nothing, lambda records: records.create_spec({"seed": 2})),
    "restore_spec": (a_dead_one, lambda records: records.restore_spec({"seed": 1})),
    "first commit": (nothing, lambda records: records.commit(3, RECORD)),
    "commit": (a_dead_one, lambda records: records.commit(3, RECORD)),
    "supersede": (a_dead_one, lambda records: records.supersede(0)),
    "note": (a_dead_one, lambda records: records.note("rollbacks", {"to": 1})),
    "note of a rerun": (a_dead_one, lambda records: records.note("reruns", {"iteration": 2})),
}
ONCE = ("create_spec", "first commit", "commit")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_happens_or_not(new_place: NewPlace, change: str, fault: str):
    before, act = CHANGES[change]
    done = new_place()
    before(done)
    act(done.writer())
    after = done.state()
    for number in itertools.count(1):
        place = new_place()
        before(place)
        seam = place.seam(0, fault)
        records, old = place.writer(seam), place.state()
        start, failed = seam.arm(number), False
        try:
            act(records)
        except place.errors:
            failed = True
        calls = len(seam.trace) - start
        assert place.state() in ([old, after, *half_done(place, change, old)] if failed else [after])
        if failed and fault in place.passing and place.state() != after:
            act(records)
            assert place.state() == after, "the same process can go on"
        if place.state() != after:
            act(place.writer())
        elif change in ONCE:
            with pytest.raises(RecordExists):
                act(place.writer())
        assert place.state() == after
        place.clear_up()
        assert place.state() == after
        assert place.superseded() == ([1, 2, 2] if change == "supersede" else [2] if before is a_dead_one else [])
        if calls < number:
            assert not failed
            break
    assert number > (1 if place.one_step else 3)


def half_done(place: Place, change: str, old: tuple[object, ...]) -> list[tuple[object, ...]]:
    """What a reader may find besides where a change takes several steps: never a gap, never another document."""
    spec, numbers, records, *notes = old
    if place.one_step:
        return []
    if change == "restore_spec":
        return [(None, numbers, records, *notes)]
    return [(spec, numbers[:-1], records[:-1], *notes)] if change == "supersede" else []


def test_a_second_commit_never_changes_the_first(new_place: NewPlace, fault: str):
    place = new_place()
    place.writer().commit(3, RECORD)
    for number in itertools.count(1):
        seam = place.seam(0, fault)
        records = place.writer(seam)
        start = seam.arm(number)
        with pytest.raises((RecordExists, *place.errors)):
            records.commit(3, {"iteration": 3, "writer": "another"})
        assert place.records().all() == [RECORD]
        if len(seam.trace) - start < number:
            assert number > 2  # else nothing was interrupted
            break


@pytest.mark.parametrize("first", [True, False])
def test_a_whole_run_appears_at_once(new_place: NewPlace, first: bool, fault: str):
    records, notes = {number: {"iteration": number} for number in range(3)}, {"rollbacks": [{"to": 4}, {"to": 2}]}
    whole = ({"seed": 1}, [0, 1, 2], list(records.values()), notes["rollbacks"], *NO_NOTES[1:])
    for number in itertools.count(1):
        place = new_place()
        if not first:
            place.runs().create("another", {}, {})
        seam, failed = place.seam(number, fault), False
        try:
            place.runs(seam).create("r", {"seed": 1}, records, notes)
        except place.errors:
            failed = True
        assert place.state() in ((NOTHING, whole) if failed else (whole,))
        assert ("r" in place.runs().names()) == (place.state() == whole)
        with suppress(RecordExists):
            place.runs().create("r", {"seed": 1}, records, notes)
        assert place.state() == whole
        if place.one_step or fault not in place.passing:
            place.clear_up()
        assert place.litter() == []
        assert place.state() == whole
        place.writer().commit(4, {"iteration": 4})
        if len(seam.trace) < number:
            assert number > 2  # else nothing was interrupted
            break
    assert number > 5


def test_a_taken_name_is_never_replaced(new_place: NewPlace, fault: str):
    place = new_place()
    place.writer().create_spec({"seed": 1})
    for number in itertools.count(1):
        seam = place.seam(number, fault)
        with pytest.raises((RecordExists, *place.errors)):
            place.runs(seam).create("r", {"seed": 2}, {})
        assert place.state() == ({"seed": 1}, [], [], *NO_NOTES)
        if len(seam.trace) < number:
            assert number > 2  # else nothing was interrupted
            break


USES: dict[str, tuple[Callable[[Lease], None], set[tuple[str, str]]]] = {
    "beat": (lambda lease: lease.beat(), {X}),
    "pin": (lambda lease: lease.pin(*Y), {X, Y}),
    "unpin_all": (lambda lease: lease.unpin_all(), set()),
}


@pytest.mark.parametrize("use", USES)
def test_a_lease_survives_what_fails_in_its_use(new_place: NewPlace, use: str, fault: str):
    act, pinned = USES[use]
    for number in itertools.count(1):
        place = new_place()
        seam = place.seam(0, fault)
        lease = place.successor(seam)
        lease.pin(*X)
        start, failed = seam.arm(number), False
        try:
            act(lease)
        except place.errors:
            failed = True
        calls = len(seam.trace) - start
        assert json.loads(place.document("heartbeat").read())["beat"] in (0, 1)
        assert failed or place.collector().pinned() == pinned
        assert X in place.collector().pinned() or use == "unpin_all"
        if calls < number:
            break
        if fault in place.passing:
            act(lease)
            lease.check()
            assert place.collector().pinned() == pinned
            lease.unpin_all()
            assert place.collector().pinned() == set(), "also what was pinned by a call that failed"
        assert len(place.successor().predecessors) == 1
    assert number > 1
