"""Every call to S3 of every write of the store fails, succeeds without an answer, or is the last one of its process.

Afterwards S3 shows the old state or the new one, nothing is lost, and the same call again succeeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from infra.artifacts import ArtifactCorrupted, ArtifactRef
from infra.artifacts.s3_files import uploads_below
from infra.storage.objects import StoreUnavailable
from tests.infra.artifacts.artifact_folders import fill, read
from tests.infra.artifacts.stores import Behind, machine
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.s3.faulty_objects import FAULTS, FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects

CONTENT = {"a.txt": b"ours", "b/c.txt": b"too"}
OTHER = {"a.txt": b"somebody was faster"}
DAMAGED = {"a.txt": b"Somebody was faster"}
KIND, KEY = "scores", "k"


def nothing(behind: Behind, base: Path) -> dict[str, bytes]:
    """Before: nothing was ever there."""
    return CONTENT


def a_known_key(behind: Behind, base: Path) -> dict[str, bytes]:
    """Before: somebody else's artifact."""
    store = machine(behind.objects, base / "other")
    store.put(fill(store.scratch(), OTHER), KIND, KEY)
    return OTHER


def a_marked_one(behind: Behind, base: Path) -> dict[str, bytes]:
    """Before: an artifact that a collector is about to take away."""
    a_known_key(behind, base)
    behind.move(reference(behind, base), "marked")
    return OTHER


def a_buried_one(behind: Behind, base: Path) -> dict[str, bytes]:
    """Before: an artifact was there, and was taken away."""
    a_known_key(behind, base)
    behind.move(reference(behind, base), "gone")
    return CONTENT


def one_with_a_lost_file(behind: Behind, base: Path) -> dict[str, bytes]:
    """Before: an artifact that is not whole."""
    a_known_key(behind, base)
    upload = behind.state(reference(behind, base))[1]
    behind.change(f"{KIND}/{KEY}/{upload}/a.txt", lambda content: None)
    return CONTENT


def reference(behind: Behind, base: Path) -> ArtifactRef:
    ref = machine(behind.objects, base / "other").find(KIND, KEY)
    assert ref is not None
    return ref


def shown(behind: Behind, cache: Path) -> dict[str, bytes] | None:
    """What another machine finds; a damaged artifact counts as none, for it is never taken for whole."""
    store = machine(behind.objects, cache)
    with suppress(ArtifactCorrupted):
        ref = store.find(KIND, KEY)
        return None if ref is None else read(store.fetch(ref))
    return None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scene", [nothing, a_known_key, a_marked_one, a_buried_one, one_with_a_lost_file])
def test_put_is_all_or_nothing_at_every_call(
    tmp_path: Path, scene: Callable[[Behind, Path], dict[str, bytes]], fault: str
):
    for number in itertools.count(1):
        base = tmp_path / str(number)
        behind = Behind(MemoryObjects())
        expected = scene(behind, base)
        store = machine(faulty := FaultyObjects(behind.objects, number, fault), base / "here")
        folder = fill(store.scratch(), CONTENT)
        with suppress(StoreUnavailable, Died):
            store.put(folder, KIND, KEY)
        if len(faulty.trace) < number:
            assert number > 2  # else nothing was interrupted
            break
        after = shown(behind, base / "second")
        assert after in (None, expected), faulty.trace[-1]
        if after is None:
            assert read(folder) == CONTENT, "neither stored nor kept"
        if folder.exists():
            again = machine(behind.objects, base / "here")
            ref = again.put(folder, KIND, KEY)
            assert read(machine(behind.objects, base / "third").fetch(ref)) == expected
            assert not folder.exists()
        # Whatever was left behind is found.
        named = behind.state(reference(behind, base))[1]
        left_behind = uploads_below(behind.objects, behind.address, KIND, KEY).unnamed
        found = {left.prefix.split("/")[-2] for left in left_behind}
        there = {key.split("/")[0] for key in behind.keys(f"{KIND}/{KEY}/") if "/" in key}
        assert there - {named} == found


@pytest.mark.parametrize("fault", FAULTS)
def test_set_aside_loses_nothing_at_any_call(tmp_path: Path, fault: str):
    for number in itertools.count(1):
        base = tmp_path / str(number)
        behind = Behind(MemoryObjects())
        a_known_key(behind, base)
        ref = reference(behind, base)
        upload = behind.state(ref)[1]
        behind.change(f"{KIND}/{KEY}/{upload}/a.txt", lambda content: DAMAGED["a.txt"])
        faulty = FaultyObjects(behind.objects, number, fault)
        with suppress(StoreUnavailable, Died):
            machine(faulty, base / "here").set_aside(KIND, KEY)
        machine(behind.objects, base / "here").set_aside(KIND, KEY)
        assert shown(behind, base / "second") is None
        assert behind.state(ref)[0] == "gone"
        kept = behind.objects.read(f"{behind.address.prefix}/damaged/{KIND}-{KEY}-{upload}/a.txt")
        assert kept is not None
        assert kept.content == DAMAGED["a.txt"]
        if len(faulty.trace) < number:
            assert number > 2  # else nothing was interrupted
            break


@pytest.mark.parametrize("fault", FAULTS)
def test_fetch_gives_what_is_right_or_an_error_at_every_call(tmp_path: Path, fault: str):
    behind = Behind(MemoryObjects())
    store = machine(behind.objects, tmp_path / "here")
    ref = store.put(fill(store.scratch(), CONTENT), KIND, KEY)
    for number in itertools.count(1):
        faulty = FaultyObjects(behind.objects, number, fault)
        with suppress(StoreUnavailable, Died):
            assert read(machine(faulty, tmp_path / str(number)).fetch(ref)) == CONTENT
        assert read(machine(behind.objects, tmp_path / str(number)).fetch(ref)) == CONTENT
        if len(faulty.trace) < number:
            assert number > 2  # else nothing was interrupted
            break
