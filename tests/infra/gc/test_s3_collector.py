"""What the collector of a bucket lists, finds left behind by the server's clock, and does while it is paused."""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import timedelta

import pytest

from infra.artifacts.s3_envelope import read_version
from infra.gc.pauses import collecting_paused
from infra.storage.objects import Pending
from tests.infra.busy_places import BusyBucket
from tests.infra.places import ADDRESS
from tests.infra.storage.s3.faulty_objects import FAULTS

ROOT = ADDRESS.uri
X = ("scores", "x")
DAY = timedelta(days=1)


def test_it_lists_artifacts_and_nothing_else() -> None:
    place = BusyBucket()
    objects = place.objects
    place.put(("scores", "a"))
    place.put(("checkpoint", "b"))
    place.put(("scores", "gone"))
    place.collector().collect([("scores", "gone")], set)
    place.writer()
    for name in ("notes.txt", "scores/half/1/a", "Other/a/b", "damaged/scores-x-1/a", "gc/pauses/a.json"):
        objects.write(f"store/{name}", b"123")
    objects.write("store/scores/unreadable/manifest.json", b"{")
    found = place.collector().artifacts()
    assert [(one.kind, one.key, one.bytes) for one in found] == [("checkpoint", "b", 240), ("scores", "a", 160)]
    (damaged,) = place.collector().damaged()
    assert (damaged.place, damaged.bytes) == ("s3://memory/store/damaged/scores-x-1/", 3)


def test_a_pause_comes_before_the_second_look_or_the_finder_saves_it() -> None:
    for number in itertools.count(1):
        place = BusyBucket()
        place.put(X)
        created = []

        def fork(place: BusyBucket = place, created: list[int] = created) -> None:
            with collecting_paused(ROOT, objects=place.objects):
                version = read_version(place.objects, ADDRESS, *X)
                if version is None or not version.exists:
                    return
                place.find_or_put(X, place.objects)
                created.append(1)

        slow = place.interrupted(fork)
        slow.arm(number)
        place.collector(slow).collect([X], lambda c=created: {X} if c else set())
        if len(slow.trace) < number:
            assert number > 2  # else nothing was interrupted
            break
        assert place.look(X) == (True if created else None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pause_that_is_not_ended_is_over_in_an_hour(fault: str) -> None:
    for number in itertools.count(1):
        place = BusyBucket()
        objects = place.objects
        place.put(X)
        faulty = place.seam(number, fault)
        with suppress(*place.errors), collecting_paused(ROOT, objects=faulty):
            assert place.collector().collect([X], set) == []
            assert place.look(X)
        objects.later(timedelta(minutes=61))
        assert [one.key for one in place.collector().collect([X], set)] == ["x"]
        place.clear_up()
        assert not [key for key in objects.content if "/gc/" in key]
        if len(faulty.trace) < number:
            assert number > 2  # else nothing was interrupted
            break


def test_orphans_are_old_and_named_by_nothing() -> None:
    place = BusyBucket()
    objects = place.objects
    place.put(X)
    records = place.writer()
    records.create_spec({})
    records.commit(0, {})
    dead = place.successor()
    dead.pin(*X)
    holder = place.successor()
    holder.pin(*X)
    collector = place.collector()
    assert [one.why for one in collector.orphans()] == ["of a lease that has ended"] * 2
    objects.write("store/scores/x/" + "2" * 32 + "/data.bin", b"123")
    objects.write("store/scores/y/" + "3" * 32 + "/deep/data.bin", b"1234")
    objects.write("store/runs/r/iterations/000001-000001-ab.json", b"12")
    objects.write("store/runs/r/leases/000009-ab/heartbeat.json", b"1")
    objects.unfinished = [Pending("store/scores/z/" + "4" * 32 + "/big.bin", "1", objects.now)]
    kept = dict(objects.content)
    assert len(collector.orphans()) == 2
    objects.later(DAY)
    found = {one.place.removeprefix("s3://memory/store/"): one.bytes for one in collector.orphans()}
    assert {place: size for place, size in found.items() if "leases/00000" not in place or "9-ab" in place} == {
        "scores/x/" + "2" * 32 + "/": 3,
        "scores/y/" + "3" * 32 + "/": 4,
        "scores/z/" + "4" * 32 + "/big.bin": 0,
        "runs/r/iterations/000001-000001-ab.json": 2,
        "runs/r/leases/000009-ab/": 0,
    }
    collector.remove(collector.orphans())
    assert (collector.orphans(), objects.unfinished) == ([], [])
    gone = kept.keys() - objects.content.keys()
    assert len(gone) == 4 + 3, "and the heartbeats and pins of two dead holders"
    assert place.look(X)
    assert collector.pinned() == {X}
    holder.check()


def test_a_file_whose_first_upload_was_broken_off_stays() -> None:
    """The server was away for a while, and the file was uploaded again under its key."""
    place = BusyBucket()
    objects = place.objects
    place.put(X, upload="2" * 32)
    file = "store/scores/x/" + "2" * 32 + "/data.bin"
    assert file in objects.content
    broken_off = Pending(file, "1", objects.now)
    objects.later(DAY)
    objects.unfinished = [broken_off, under_way := Pending(file, "2", objects.now)]
    before = dict(objects.content)
    (orphan,) = orphans = place.collector().orphans()
    assert (orphan.place, orphan.why) == (f"s3://memory/{file}", "an upload that was broken off a day ago")
    place.collector().remove(orphans)
    assert {key: content for key, content in objects.content.items() if "/gc/" not in key} == before
    assert objects.unfinished == [under_way]
    assert place.look(X)


def test_what_was_an_orphan_and_is_named_now_stays() -> None:
    place = BusyBucket()
    objects = place.objects
    place.put(("scores", "other"))
    objects.write("store/scores/x/" + "2" * 32 + "/data.bin", b"12345")
    objects.later(DAY)
    orphans = place.collector().orphans()
    assert len(orphans) == 1
    place.put(X, upload="2" * 32)
    assert place.collector().remove(orphans) == 0
    assert place.look(X)


def test_what_no_writer_of_a_store_makes_is_left_alone() -> None:
    place = BusyBucket()
    objects = place.objects
    place.put(X)
    records = place.writer()
    records.create_spec({})
    records.commit(0, {})
    folders = ("", "scores/", "scores/x/", "runs/", "runs/r/", "runs/r/leases/", "gc/", "gc/pauses/", "damaged/")
    foreign = (
        *("scores//x", "scores//" + "2" * 32 + "/x", "scores/X/" + "2" * 32 + "/x", "scores/x/backup/data.bin"),
        *("runs/r/leases/notes", "runs/r/leases/notes/a", "mlflow/1/" + "3" * 32 + "/artifacts/model.bin"),
    )
    for name in (*folders, *foreign):
        objects.write(f"store/{name}", b"1")
    upload = Pending("store/mlflow/1/" + "3" * 32 + "/artifacts/model.bin", "1", objects.now)
    objects.unfinished = [upload, Pending("store/scores/x/backup/data.bin", "2", objects.now)]
    pending = list(objects.unfinished)
    objects.later(10 * DAY)
    before = dict(objects.content)
    collector = place.collector()
    collector.remove(orphans := collector.orphans())
    assert [one.place for one in orphans] == []
    assert {key: before[key] for key in before if "/gc/" not in key or key.endswith("/")} == {
        key: content for key, content in objects.content.items() if "/gc/" not in key or key.endswith("/")
    }
    assert objects.unfinished == pending
    assert collector.damaged() == []
    assert [(one.kind, one.key) for one in collector.artifacts()] == [X]
