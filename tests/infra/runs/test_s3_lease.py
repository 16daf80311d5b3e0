"""Who gets a run on S3, who is refused, and that one who lost it can change nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from infra.process_identity import ProcessIdentity
from infra.runs.lease import LeaseHeld, LeaseLost
from infra.runs.lease_expiry import EXPIRY_S
from infra.runs.records import RecordExists
from infra.runs.s3_lease import S3Lease, acquire_lease
from infra.runs.s3_records import S3Records
from tests.infra.runs.bucket_runs import ROOT, records_of, state, successor, writer
from tests.infra.runs.leases import StillClock, holds, somebody
from tests.infra.storage.s3.memory_objects import InterruptedObjects, MemoryObjects
from tests.waiting import LONG_S

CHANGES: dict[str, Callable[[S3Records], Any]] = {
    "create_spec": lambda records: records.create_spec({"lease": 1}),
    "first commit": lambda records: records.commit(0, {"lease": 1}),
    "commit": lambda records: records.commit(3, {"lease": 1}),
    "supersede": lambda records: records.supersede(0),
    "first note": lambda records: records.note("divergences", {"lease": 1}),
    "note": lambda records: records.note("rollbacks", {"lease": 1}),
}
USES: dict[str, Callable[[S3Lease], None]] = {
    "beat": S3Lease.beat,
    "pin": lambda lease: lease.pin("scores", "k"),
    "unpin_all": S3Lease.unpin_all,
    "release": S3Lease.release,
}


def take(
    objects: MemoryObjects,
    still: StillClock,
    alive: bool | None,
    *,
    wait: bool = False,
    note: dict[str, str] | None = None,
) -> S3Lease:
    """A lease for a new made-up process."""
    return acquire_lease(
        ROOT,
        "r",
        note=note,
        wait=wait,
        objects=objects,
        identity=somebody(),
        alive=lambda _: alive,
        clock=still.clock,
    )


def prepared(change: str) -> MemoryObjects:
    """A run in which this change can be made."""
    objects = MemoryObjects()
    if change != "create_spec":
        records = writer(objects)
        for iteration in range(0 if change == "first commit" else 3):
            records.commit(iteration, {"lease": 0})
        if change == "note":
            records.note("rollbacks", {"lease": 0})
    return objects


def test_a_released_run_can_be_acquired_again_under_a_higher_number() -> None:
    objects = MemoryObjects()
    for number in (1, 2, 3):
        lease = acquire_lease(ROOT, "r", objects=objects)
        assert (lease.run, lease.number, lease.predecessors, lease.lost) == ("r", number, (), False)
        lease.check()
        lease.beat()
        lease.pin("scores", "k")
        lease.release()
        lease.release()
        assert lease.lost
        for use in (lease.check, lease.beat, lease.unpin_all, lambda lease=lease: lease.pin("scores", "k")):
            with pytest.raises(LeaseLost, match=f"run r: this process no longer has the run, its lease {number} has"):
                use()
    assert list(objects.content) == ["store/runs/r/head.json"], "nothing else is left"


def test_a_dead_holder_is_taken_over_at_once_and_a_living_one_refuses() -> None:
    objects, still = MemoryObjects(), StillClock()
    first = take(objects, still, True, note={"flow": "abc"})
    still.seconds += EXPIRY_S - 1
    with pytest.raises(LeaseHeld, match=r"process \d+ on here .* has it, last heard of 39 s ago: wait .*\(kill"):
        take(objects, still, True)
    first.beat()
    still.seconds += EXPIRY_S
    with pytest.raises(LeaseHeld):
        take(objects, still, True)
    before = still.seconds
    second = take(objects, still, False)
    assert (second.number, still.seconds) == (2, before)
    assert [holder.note for holder in second.predecessors] == [{"flow": "abc"}]
    with pytest.raises(LeaseLost, match=r"its lease 1 was taken over; process \d+ on here \(since .*\) has it now"):
        first.beat()
    first.release()
    second.check()
    still.seconds += EXPIRY_S + 0.1
    assert take(objects, still, True).number == 3, "alive, but silent for too long"


def test_a_silent_one_elsewhere_is_taken_over_after_the_expiry_and_not_before() -> None:
    objects, theirs, ours = MemoryObjects(), StillClock(), StillClock()
    take(objects, theirs, True)
    theirs.seconds += 10**6
    began = ours.seconds
    assert take(objects, ours, None).number == 2
    assert EXPIRY_S <= ours.seconds - began <= EXPIRY_S + 1


def test_a_beating_one_elsewhere_is_refused() -> None:
    objects, theirs, ours = MemoryObjects(), StillClock(), StillClock()
    first = take(objects, theirs, True)
    began = ours.seconds
    ours.while_asleep = lambda: first.beat() if ours.seconds - began > EXPIRY_S - 1 else None
    with pytest.raises(LeaseHeld, match=r"process \d+ on here .* last heard of just now"):
        take(objects, ours, None)
    assert ours.seconds - began < EXPIRY_S
    first.check()


@pytest.mark.parametrize("ends", ["falls silent", "lets go"])
def test_one_elsewhere_is_waited_for(ends: str) -> None:
    objects, theirs, ours = MemoryObjects(), StillClock(), StillClock()
    first = take(objects, theirs, True)
    began = ours.seconds

    def beat_for_a_while() -> None:
        if ours.seconds - began < 300:
            first.beat()
        elif ends == "lets go":
            first.release()

    ours.while_asleep = beat_for_a_while
    second = take(objects, ours, None, wait=True)
    assert (second.number, len(second.predecessors)) == (2, ends == "falls silent")
    assert -1 <= ours.seconds - began - 300 - (0 if ends == "lets go" else EXPIRY_S) <= 1


@pytest.mark.parametrize("leave", ["released", "dead"])
def test_one_of_eight_gets_the_lease(leave: str) -> None:
    rounds, contenders, objects = 40, 8, MemoryObjects()
    start, stop = threading.Barrier(contenders), threading.Barrier(contenders)
    won: list[tuple[int, int, int]] = []
    refused: list[LeaseHeld] = []
    gone: set[ProcessIdentity] = set()

    def contend() -> None:
        for turn in range(rounds):
            me, lease = somebody(), None
            start.wait(timeout=LONG_S)
            try:
                lease = acquire_lease(ROOT, "r", objects=objects, identity=me, alive=lambda other: other not in gone)
                won.append((turn, lease.number, len(lease.predecessors)))
            except LeaseHeld as refusal:
                refused.append(refusal)
            stop.wait(timeout=LONG_S)
            if lease is not None:
                lease.release() if leave == "released" else gone.add(me)

    threads = [threading.Thread(target=contend) for _ in range(contenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LONG_S)
    assert [turn for turn, _, _ in won] == list(range(rounds))
    assert [number for _, number, _ in won] == list(range(1, rounds + 1))
    assert all(taken == (leave == "dead" and turn > 0) for turn, _, taken in won)
    assert len(refused) == rounds * (contenders - 1)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_happens_before_the_takeover_or_never(change: str, goes_on: bool) -> None:
    for number in itertools.count(1):
        objects = prepared(change)
        before = state(objects)
        seen: list[tuple[object, ...]] = []

        def take_over(objects: MemoryObjects = objects, seen: list[tuple[object, ...]] = seen) -> None:
            records = writer(objects)
            seen.append(state(objects))
            if goes_on:
                # The successor does the same again, or as much of it as is left to do.
                with suppress(RecordExists):
                    CHANGES[change](records)
                seen[0] = state(objects)

        slow = InterruptedObjects(objects, take_over)
        lease = successor(slow)
        start = len(slow.trace)
        slow.arm(number)
        outcome = None
        try:
            CHANGES[change](records_of(slow, lease=lease))
        except LeaseLost as lost:
            outcome = lost
        if not seen:
            assert outcome is None
            assert len(slow.trace) - start < number
            break
        assert state(objects) == seen[0], f"changed after the takeover, before {slow.trace[start + number - 1]}"
        if not goes_on:
            assert outcome is not None
            assert seen[0] == before
        with pytest.raises(LeaseLost):
            lease.check()
        with pytest.raises(LeaseLost):
            records_of(objects, lease=lease).commit(77, {})
        assert state(objects) == seen[0]
    assert number > 1, "there were calls to interrupt"


@pytest.mark.parametrize("use", USES)
def test_a_lost_lease_disturbs_no_successor(use: str) -> None:
    for number in itertools.count(1):
        objects = MemoryObjects()
        taken: list[S3Lease] = []
        slow = InterruptedObjects(objects, lambda objects=objects, taken=taken: taken.append(successor(objects)))
        lease = successor(slow)
        lease.pin("rollouts", "k")
        start = len(slow.trace)
        slow.arm(number)
        with suppress(LeaseLost):
            USES[use](lease)
        if not taken:
            assert len(slow.trace) - start < number
            break
        taken[0].check()
        taken[0].beat()
        with pytest.raises(LeaseLost):
            lease.check()
    assert number > 1


@pytest.mark.parametrize("meanwhile", ["acquired", "acquired and released", "acquired twice", "taken over"])
@pytest.mark.parametrize("before", ["nothing", "a released one", "a dead one"])
def test_two_acquire_at_once_at_every_call(before: str, meanwhile: str) -> None:
    for number in itertools.count(1):
        objects, slow = MemoryObjects(), somebody()
        if before != "nothing":
            first = successor(objects)
            if before == "a released one":
                first.release()
        others: list[S3Lease] = []

        def interfere(
            objects: MemoryObjects = objects, others: list[S3Lease] = others, slow: ProcessIdentity = slow
        ) -> None:
            def alive(other: ProcessIdentity) -> bool:
                return other == slow and meanwhile != "taken over"

            for _ in range(2 if meanwhile == "acquired twice" else 1):
                with suppress(LeaseHeld):
                    others.append(acquire_lease(ROOT, "r", objects=objects, identity=somebody(), alive=alive))
                    if "released" in meanwhile or (meanwhile == "acquired twice" and len(others) == 1):
                        others[-1].release()

        seam = InterruptedObjects(objects, interfere)
        seam.arm(number)
        mine: S3Lease | None = None
        with suppress(LeaseHeld):
            mine = acquire_lease(
                ROOT, "r", objects=seam, identity=slow, alive=lambda other, others=others: bool(others)
            )
        calls = len(seam.trace)
        seam.arm(0)
        holding = [lease for lease in (mine, *others) if lease is not None and holds(lease)]
        assert len(holding) == 1, f"{len(holding)} have the run"
        numbers = [lease.number for lease in (mine, *others) if lease is not None]
        assert len(numbers) == len(set(numbers))
        records_of(objects, lease=holding[0]).commit(0, {})
        if calls < number:
            break
    assert number > 3
