"""A holder that was stopped past its lease and goes on can change nothing, wherever it was stopped, in any store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from infra.process_identity import ProcessIdentity
from infra.runs.lease import Lease, LeaseHeld, LeaseLost
from infra.runs.records import RecordExists, RunRecords
from tests.infra.places import Place
from tests.infra.runs.leases import holds, somebody

CHANGES: dict[str, Callable[[RunRecords], Any]] = {
    "create_spec": lambda records: records.create_spec({"lease": 1}),
    "restore_spec": lambda records: records.restore_spec({"lease": 1}),
    "first commit": lambda records: records.commit(0, {"lease": 1}),
    "commit": lambda records: records.commit(3, {"lease": 1}),
    "supersede": lambda records: records.supersede(0),
    "first note": lambda records: records.note("divergences", {"lease": 1}),
    "note": lambda records: records.note("rollbacks", {"lease": 1}),
}
USES: dict[str, Callable[[Lease], None]] = {
    "beat": lambda lease: lease.beat(),
    "pin": lambda lease: lease.pin("scores", "k"),
    "unpin_all": lambda lease: lease.unpin_all(),
    "release": lambda lease: lease.release(),
}


def prepared(place: Place, change: str) -> Place:
    """A run in which this change can be made."""
    if "spec" not in change:
        records = place.writer()
        for iteration in range(0 if change == "first commit" else 3):
            records.commit(iteration, {"lease": 0})
        if change == "note":
            records.note("rollbacks", {"lease": 0})
    return place


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_happens_before_the_takeover_or_never(new_place: Callable[[], Place], change: str, goes_on: bool):
    for number in itertools.count(1):
        place = prepared(new_place(), change)
        before = place.state()
        seen: list[tuple[object, ...]] = []

        def take_over(place: Place = place, seen: list[tuple[object, ...]] = seen) -> None:
            records = place.writer()
            seen.append(place.state())
            if goes_on:
                # The successor does the same again, or as much of it as is left to do.
                with suppress(RecordExists):
                    CHANGES[change](records)
                seen[0] = place.state()

        slow = place.interrupted(take_over)
        lease = place.successor(slow)
        records, start = place.records(lease=lease, seam=slow), slow.arm(number)
        outcome = None
        try:
            CHANGES[change](records)
        except LeaseLost as lost:
            outcome = lost
        if not seen:
            assert outcome is None
            assert len(slow.trace) - start < number
            break
        assert place.state() == seen[0], f"changed after the takeover, before {slow.trace[start + number - 1]}"
        if not goes_on:
            assert outcome is not None or seen[0] != before, "nothing done, and nothing said"
            assert not place.one_step or (outcome is not None and seen[0] == before)
        for use in (lease.check, lambda records=records: records.commit(77, {})):
            with pytest.raises(LeaseLost):
                use()
        assert place.state() == seen[0]
    assert number > (1 if place.one_step else 4), "there were calls to interrupt"


@pytest.mark.parametrize("use", USES)
def test_a_lost_lease_disturbs_no_successor(new_place: Callable[[], Place], use: str):
    for number in itertools.count(1):
        place = new_place()
        taken: list[Lease] = []
        slow = place.interrupted(lambda place=place, taken=taken: taken.append(place.successor()))
        lease = place.successor(slow)
        lease.pin("rollouts", "k")
        start = slow.arm(number)
        with suppress(LeaseLost):
            USES[use](lease)
        if not taken:
            assert len(slow.trace) - start < number
            break
        taken[0].check()
        taken[0].beat()
        assert (place.collector().pinned(), place.in_force()) == (set(), [2])
        with pytest.raises(LeaseLost):
            lease.check()
    assert number > 1


@pytest.mark.parametrize("meanwhile", ["acquired", "acquired and released", "acquired twice", "taken over"])
@pytest.mark.parametrize("before", ["nothing", "a released one", "a dead one"])
def test_two_acquire_at_once_at_every_call(new_place: Callable[[], Place], before: str, meanwhile: str):
    """While one acquires, at each of its calls another does it all; every number is given once."""
    for number in itertools.count(1):
        place, slow = new_place(), somebody()
        if before != "nothing":
            first = place.successor()
            if before == "a released one":
                first.release()
        others: list[Lease] = []

        def interfere(place: Place = place, others: list[Lease] = others, slow: ProcessIdentity = slow) -> None:
            def alive(other: ProcessIdentity) -> bool:
                return other == slow and meanwhile != "taken over"

            for _ in range(2 if meanwhile == "acquired twice" else 1):
                with suppress(LeaseHeld):
                    others.append(place.acquire(identity=somebody(), alive=alive))
                    if "released" in meanwhile or (meanwhile == "acquired twice" and len(others) == 1):
                        others[-1].release()

        seam = place.interrupted(interfere)
        seam.arm(number)
        mine: Lease | None = None
        with suppress(LeaseHeld):
            mine = place.acquire(seam=seam, identity=slow, alive=lambda other, others=others: bool(others))
        calls = len(seam.trace)
        seam.arm(0)
        leases = [lease for lease in (mine, *others) if lease is not None]
        holding = [lease for lease in leases if not lease.lost and holds(lease)]
        assert len(holding) == 1, f"{len(holding)} have the run"
        numbers = [lease.number for lease in leases]
        assert len(numbers) == len(set(numbers))
        assert min(numbers) > (0 if before == "nothing" else 1)
        place.records(lease=holding[0]).commit(0, {})
        assert place.in_force() == [holding[0].number]
        if calls < number:
            break
    assert number > place.acquires_in


def test_only_the_holder_of_the_lease_restores_a_spec(place: Place):
    records = place.writer()
    place.successor()
    with pytest.raises(LeaseLost):
        records.restore_spec({"seed": 1})
    with pytest.raises(ValueError, match="open for reading only"):
        place.records().restore_spec({"seed": 1})
    assert place.records().read_spec() is None
