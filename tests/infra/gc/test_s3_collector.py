"""What the collector of a store on S3 removes, and what it never does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest

from infra.artifacts.s3_envelope import move, read_version
from infra.gc.hold import collecting_paused
from infra.runs.s3_lease import S3Lease
from infra.storage.objects import Objects, Pending
from tests.infra.runs.bucket_runs import (
    ADDRESS,
    ROOT,
    Name,
    collector_on,
    look,
    put,
    records_of,
    successor,
    writer,
)
from tests.infra.storage.s3.memory_objects import InterruptedObjects, MemoryObjects

X = ("scores", "x")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def test_it_lists_artifacts_and_nothing_else() -> None:
    objects = MemoryObjects()
    assert (collector_on(objects).artifacts(), collector_on(objects).collect([X], set)) == ([], [])
    put(objects, ("scores", "a"))
    put(objects, ("checkpoint", "b"))
    put(objects, ("scores", "gone"))
    collector_on(objects).collect([("scores", "gone")], set)
    writer(objects)
    for name in ("notes.txt", "scores/half/1/a", "Other/a/b", "damaged/scores-x-1/a", "gc/pauses/a.json"):
        objects.write(f"store/{name}", b"123")
    objects.write("store/scores/unreadable/manifest.json", b"{")
    found = collector_on(objects).artifacts()
    assert [(one.kind, one.key, one.bytes) for one in found] == [("checkpoint", "b", 5), ("scores", "a", 5)]
    (damaged,) = collector_on(objects).damaged()
    assert (damaged.place, damaged.bytes) == ("s3://memory/store/damaged/scores-x-1/", 3)


def test_it_removes_what_is_wanted_and_neither_needed_nor_pinned() -> None:
    objects = MemoryObjects()
    for key in "abcde":
        put(objects, ("scores", key))
    leases = {run: successor(objects, run) for run in ("r1", "r2", "r3")}
    for run, key in (("r1", "a"), ("r2", "b"), ("r3", "c")):
        leases[run].pin("scores", key)
    leases["r3"].release()
    collector = collector_on(objects)
    assert collector.pinned() == {("scores", "a"), ("scores", "b")}
    wanted = [("scores", key) for key in "abcd"] + [("scores", "never"), ("other", "a")]
    assert [(one.key, one.bytes) for one in collector.collect(wanted, lambda: {("scores", "d")})] == [("c", 5)]
    assert [look(objects, ("scores", key)) is not None for key in "abcde"] == [True, True, False, True, True]
    leases["r1"].unpin_all()
    successor(objects, "r2")
    assert [one.key for one in collector.collect(wanted, set)] == ["a", "b", "d"]
    put(objects, ("scores", "a"), "1" * 32)
    assert look(objects, ("scores", "a")) == b"12345", "it can be made again"


def test_what_cannot_be_asked_stops_a_collection() -> None:
    objects = MemoryObjects()
    put(objects, X)

    def damaged() -> set[Name]:
        raise RuntimeError("record 3 is damaged")

    with pytest.raises(RuntimeError, match="record 3"):
        collector_on(objects).collect([X], damaged)
    assert look(objects, X) == b"12345"


def find_or_put(objects: Objects) -> None:
    """As a store does: what is condemned is saved; what is gone is made again."""
    while True:
        version = read_version(objects, ADDRESS, *X)
        if version is None or not version.exists:
            put(objects, X, "1" * 32)
            return
        if version.envelope.state == "live" or move(objects, ADDRESS, *X, version, "live") is not None:
            return


def work(objects: Objects, lease: S3Lease) -> None:
    """Find or make an artifact as a task does, and commit a record that names it."""
    lease.pin(*X)
    find_or_put(objects)
    commit(objects, lease)


def work_wrongly(objects: Objects, lease: S3Lease) -> None:
    """Look before pinning."""
    find_or_put(objects)
    lease.pin(*X)
    commit(objects, lease)


def commit(objects: Objects, lease: S3Lease) -> None:
    """The record, and then the pins."""
    records_of(objects, lease=lease).commit(0, {"names": [list(X)]})
    lease.unpin_all()


def named(objects: Objects) -> set[Name]:
    """What the records name."""
    return {(kind, key) for record in records_of(objects).all() for kind, key in record["names"]}


Act = Callable[[Objects, S3Lease], None]


def collected_at_every_call(act: Act, there: bool) -> list[bytes | None]:
    """What the record's artifact is where a whole collection happens before each call of a writer."""
    outcomes = []
    for number in itertools.count(1):
        objects = MemoryObjects()
        if there:
            put(objects, X)
        slow = InterruptedObjects(objects, lambda o=objects: collector_on(o).collect([X], lambda: named(o)))
        lease = successor(slow)
        start = len(slow.trace)
        slow.arm(number)
        act(slow, lease)
        outcomes.append(look(objects, X))
        if len(slow.trace) - start < number:
            return outcomes
    raise AssertionError("unreachable")


def written_at_every_call(act: Act, there: bool) -> list[bytes | None]:
    """The same where a writer does all its work before each call of a collection."""
    outcomes = []
    for number in itertools.count(1):
        objects = MemoryObjects()
        if there:
            put(objects, X)
        lease = successor(objects)
        slow = InterruptedObjects(objects, lambda o=objects, lease=lease: act(o, lease))
        slow.arm(number)
        collector_on(slow).collect([X], lambda s=slow: named(s))
        if len(slow.trace) < number:
            return outcomes
        outcomes.append(look(objects, X))
    raise AssertionError("unreachable")


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("interleave", [collected_at_every_call, written_at_every_call])
def test_what_a_record_names_is_never_collected(
    interleave: Callable[[Act, bool], list[bytes | None]], there: bool
) -> None:
    outcomes = interleave(work, there)
    assert set(outcomes) == {b"12345"} if outcomes else not there
    assert len(outcomes) > (3 if there else -1)


def test_who_looks_before_pinning_loses_what_was_found() -> None:
    """The order matters, and these tests can tell."""
    assert None in collected_at_every_call(work_wrongly, True)


def test_two_collectors_at_once_at_every_call() -> None:
    for number in itertools.count(1):
        objects = MemoryObjects()
        for key in "ab":
            put(objects, ("scores", key))
        wanted = [("scores", "a"), ("scores", "b")]
        removed: list[str] = []

        def collect(objects: Objects, removed: list[str] = removed, wanted: list[Name] = wanted) -> None:
            removed += [one.key for one in collector_on(objects).collect(wanted, lambda: {("scores", "b")})]

        slow = InterruptedObjects(objects, lambda o=objects, collect=collect: collect(o))
        slow.arm(number)
        collect(slow)
        assert (removed.count("a"), removed.count("b")) == (1, 0)
        assert (look(objects, ("scores", "a")), look(objects, ("scores", "b"))) == (None, b"12345")
        if len(slow.trace) < number:
            break


def test_a_pause_comes_before_the_second_look_or_the_finder_saves_it() -> None:
    for number in itertools.count(1):
        objects = MemoryObjects()
        put(objects, X)
        created = []

        def fork(objects: MemoryObjects = objects, created: list[int] = created) -> None:
            with collecting_paused(ROOT, objects=objects):
                version = read_version(objects, ADDRESS, *X)
                if version is None or not version.exists:
                    return
                find_or_put(objects)
                created.append(1)

        slow = InterruptedObjects(objects, fork)
        slow.arm(number)
        collector_on(slow).collect([X], lambda c=created: {X} if c else set())
        if len(slow.trace) < number:
            break
        assert look(objects, X) == (b"12345" if created else None)


def test_leftovers_are_old_and_named_by_nothing() -> None:
    objects = MemoryObjects()
    put(objects, X)
    records = writer(objects)
    records.create_spec({})
    records.commit(0, {})
    dead = successor(objects)
    dead.pin(*X)
    holder = successor(objects)
    holder.pin(*X)
    collector = collector_on(objects)
    assert [one.why for one in collector.leftovers()] == ["of a lease that has ended"] * 2
    objects.write("store/scores/x/" + "2" * 32 + "/data.bin", b"123")
    objects.write("store/scores/y/" + "3" * 32 + "/deep/data.bin", b"1234")
    objects.write("store/runs/r/iterations/000001-000001-ab.json", b"12")
    objects.write("store/runs/r/leases/000009-ab/heartbeat.json", b"1")
    objects.unfinished = [Pending("store/scores/z/" + "4" * 32 + "/big.bin", "1", objects.now)]
    kept = dict(objects.content)
    assert len(collector.leftovers()) == 2
    objects.later(DAY)
    found = {one.place.removeprefix("s3://memory/store/"): one.bytes for one in collector.leftovers()}
    assert {place: size for place, size in found.items() if "leases/00000" not in place or "9-ab" in place} == {
        "scores/x/" + "2" * 32 + "/": 3,
        "scores/y/" + "3" * 32 + "/": 4,
        "scores/z/" + "4" * 32 + "/big.bin": 0,
        "runs/r/iterations/000001-000001-ab.json": 2,
        "runs/r/leases/000009-ab/": 0,
    }
    collector.remove(collector.leftovers())
    assert (collector.leftovers(), objects.unfinished) == ([], [])
    gone = kept.keys() - objects.content.keys()
    assert len(gone) == 4 + 3, "and the heartbeats and pins of two dead holders"
    assert look(objects, X) == b"12345"
    assert collector.pinned() == {X}
    holder.check()


def test_what_was_a_leftover_and_is_named_now_stays() -> None:
    objects = MemoryObjects()
    objects.write("store/scores/x/" + "2" * 32 + "/data.bin", b"12345")
    objects.later(DAY)
    leftovers = collector_on(objects).leftovers()
    assert len(leftovers) == 1
    put(objects, X, "2" * 32)
    assert collector_on(objects).remove(leftovers) == 0
    assert look(objects, X) == b"12345"
