"""What a collector removes, and what it never does, wherever a writer or another collector meets it, in any store."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest

from infra.artifacts import ArtifactMissing
from infra.runs.lease import Lease
from tests.infra.busy_places import BusyBucket, BusyPlace, Disk, Name, Process
from tests.infra.places import Seam

X, Y, Z = ("scores", "x"), ("scores", "y"), ("scores", "z")
NewPlace = Callable[[], BusyPlace]


def test_it_removes_what_is_wanted_and_neither_needed_nor_pinned(busy_place: BusyPlace):
    place = busy_place
    collector = place.collector()
    assert (collector.artifacts(), collector.collect([X], set)) == ([], [])
    for key in "abcde":
        place.put(("scores", key))
    stored = {one.key: one for one in collector.artifacts()}
    assert (sorted(stored), {one.kind for one in stored.values()}) == (list("abcde"), {"scores"})
    leases = {run: place.successor(run=run) for run in ("r1", "r2", "r3")}
    for run, key in (("r1", "a"), ("r2", "b"), ("r3", "c")):
        leases[run].pin("scores", key)
    leases["r3"].release()
    assert collector.pinned() == {("scores", "a"), ("scores", "b")}
    wanted = [("scores", key) for key in "abcd"] + [("scores", "never"), ("other", "a")]
    assert collector.collect(wanted, lambda: {("scores", "d")}) == [stored["c"]]
    assert [place.look(("scores", key)) for key in "abcde"] == [True, True, None, True, True]
    leases["r1"].unpin_all()
    place.successor(run="r2")
    assert collector.collect(wanted, set) == [stored[key] for key in "abd"]
    assert collector.collect(wanted, set) == []
    place.put(("scores", "a"))
    assert place.look(("scores", "a")), "it can be made again"


def test_what_cannot_be_asked_stops_a_collection(busy_place: BusyPlace):
    busy_place.put(X)

    def damaged() -> set[Name]:
        raise RuntimeError("record 3 is damaged")

    with pytest.raises(RuntimeError, match="record 3"):
        busy_place.collector().collect([X], damaged)
    assert busy_place.look(X)
    assert [one.key for one in busy_place.collector().collect([X], set)] == ["x"], "and no other one"


Work = Callable[[BusyPlace, Process, Lease], None]
Search = Callable[[BusyPlace, Process], None]


def work(place: BusyPlace, seam: Process, lease: Lease) -> None:
    """Find or make an artifact as a task does, and commit a record that names it."""
    lease.pin(*X)
    place.find_or_put(X, seam)
    commit(place, seam, lease)


def work_wrongly(place: BusyPlace, seam: Process, lease: Lease) -> None:
    """Look before pinning."""
    place.find_or_put(X, seam)
    lease.pin(*X)
    commit(place, seam, lease)


def commit(place: BusyPlace, seam: Process, lease: Lease) -> None:
    """The record, and then the pins."""
    place.records(lease=lease, seam=seam).commit(0, {"names": [list(X)]})
    lease.unpin_all()


def named(place: BusyPlace, seam: Seam = None) -> set[Name]:
    """What the records name."""
    return {(kind, key) for record in place.records(seam=seam).all() for kind, key in record["names"]}


def collect(place: BusyPlace, seam: Process) -> None:
    """As it must be done."""
    place.collector(seam).collect([X], lambda: named(place, seam))


def collect_wrongly(place: BusyPlace, seam: Process) -> None:
    """Ask the records before nothing can be pinned any more."""
    before = named(place, seam)
    place.collector(seam).collect([X], lambda: before)


def meet(first: Process, second: Process, steps: int) -> int:
    """One process makes so many calls, the other all it can, then both end; how many the first one made."""
    before = len(first.trace)
    first.step(steps)
    done = len(first.trace) - before
    for process in (second, first, second):
        if process.work is not None:
            process.step(10_000)
    assert (first.work, second.work) == (None, None)
    return done


def lost(
    new_place: NewPlace, *, collector_first: bool, there: bool, work: Work = work, search: Search = collect
) -> int:
    """At how many of the moments at which one meets the other the record's artifact is lost; 0 of at least four."""
    losses = 0
    for steps in itertools.count():
        place = new_place()
        place.put(X if there else Y)
        writer, collector = place.process(), place.process()
        lease = place.successor(writer)
        writer.begin("work", lambda p=place, w=writer, lease=lease: work(p, w, lease))
        collector.begin("collect", lambda p=place, c=collector: search(p, c))
        pair = (collector, writer) if collector_first else (writer, collector)
        try:
            done = meet(*pair, steps)
        except ArtifactMissing:  # it was taken away from under the writer
            losses += 1
            continue
        assert named(place) == {X}
        losses += not place.look(X)
        if done < steps:
            assert steps > (3 if there or not collector_first else 0)
            return losses
    raise AssertionError("unreachable")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("collector_first", [True, False])
def test_what_a_record_names_is_never_removed(new_busy_place: NewPlace, collector_first: bool, there: bool):
    assert lost(new_busy_place, collector_first=collector_first, there=there) == 0


def test_a_writer_or_a_collector_that_does_it_wrongly_would_lose(new_busy_place: NewPlace):
    """The order matters, and these tests can tell."""
    assert lost(new_busy_place, collector_first=False, there=True, work=work_wrongly) > 0
    assert lost(new_busy_place, collector_first=True, there=True, search=collect_wrongly) > 0


def test_two_collectors_at_once(new_busy_place: NewPlace):
    wanted = [("scores", "a"), ("scores", "b")]
    for steps in itertools.count():
        place = new_busy_place()
        for name in wanted:
            place.put(name)
        removed: list[str] = []

        def work(seam: Process, place: BusyPlace = place, removed: list[str] = removed) -> None:
            removed += [one.key for one in place.collector(seam).collect(wanted, lambda: {("scores", "b")})]

        pair = place.process(), place.process()
        for one in pair:
            one.begin("collect", lambda one=one, work=work: work(one))
        done = meet(*pair, steps)
        assert (removed, [place.look(name) for name in wanted]) == (["a"], [None, True])
        if done < steps:
            break
    assert steps > 3


@pytest.mark.parametrize(
    ("new_busy_place", "fault"),
    [(kind, fault) for kind in (Disk, BusyBucket) for fault in kind.faults],
    indirect=["new_busy_place"],
    ids=lambda value: value if isinstance(value, str) else value.__name__.lower(),
)
def test_each_artifact_is_whole_or_gone_at_every_call(new_busy_place: NewPlace, fault: str):
    for number in itertools.count(1):
        place = new_busy_place()
        for name in (X, Y, Z):
            place.put(name)
        lease = place.successor()
        lease.pin(*Y)
        seam, removed = place.seam(number, fault), None
        with suppress(*place.errors):
            removed = [one.key for one in place.collector(seam).collect([X, Y, Z], lambda: {Z})]
        assert place.look(X) in (True, None)
        assert removed is None or (removed, place.look(X)) == (["x"], None)
        assert [place.look(name) for name in (Y, Z)] == [True] * 2
        assert place.collector().collect([Y, Z], lambda: {Z}) == []
        place.collector().collect([X], set)
        assert place.look(X) is None
        lease.release()
        assert [one.key for one in place.collector().collect([Y, Z], set)] == ["y", "z"]
        place.put(X)
        place.clear_up()
        assert ([one.key for one in place.collector().artifacts()], place.look(X)) == (["x"], True)
        if len(seam.trace) < number:
            break
    assert number > 10
