"""Every operation of every write of the store fails, or is the last one of its process.

Afterwards the disk shows the old state or the new one, nothing is lost, and the same call again succeeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.artifacts import ArtifactCorrupted, ArtifactRef
from infra.artifacts.local_store import LocalStore
from tests.infra.artifacts.artifact_folders import CONTENT, fill, read
from tests.infra.storage.faulty_files import ALIKE, FAULTS, Died, FaultyFiles

OTHER = {"a.txt": b"somebody was faster"}
EACH = [pytest.param(fault, marks=[pytest.mark.thorough] if fault in ALIKE else []) for fault in FAULTS]


@dataclass(frozen=True)
class Scene:
    """A store as it is before the call, the folder to put, and what the store may show afterwards."""

    store: Path
    folder: Path
    expected: dict[str, bytes]
    other_disk: Path | None = None


def quick(root: Path, files: FaultyFiles | None = None) -> LocalStore:
    return LocalStore(root, files=files or FaultyFiles(), libraries={})


def first_put(base: Path) -> Scene:
    store = quick(base / "store")
    return Scene(base / "store", fill(store.scratch(), CONTENT), CONTENT)


def put_into_nothing(base: Path) -> Scene:
    return Scene(base / "not" / "yet", fill(base / "mine", CONTENT), CONTENT)


def put_from_another_disk(base: Path) -> Scene:
    folder = fill(base / "mine", CONTENT)
    return Scene(base / "store", folder, CONTENT, other_disk=folder)


def put_of_a_known_key(base: Path) -> Scene:
    store = quick(base / "store")
    store.put(fill(store.scratch(), OTHER), "scores", "k")
    return Scene(base / "store", fill(store.scratch(), CONTENT), OTHER)


def put_over_a_damaged_one(base: Path) -> Scene:
    scene = put_of_a_known_key(base)
    (scene.store / "scores/k/a.txt").chmod(0o644)
    (scene.store / "scores/k/a.txt").write_bytes(b"Somebody was faster")
    return Scene(scene.store, scene.folder, CONTENT)


def put_over_one_without_manifest(base: Path) -> Scene:
    scene = put_of_a_known_key(base)
    (scene.store / "scores/k/manifest.json").unlink()
    return Scene(scene.store, scene.folder, CONTENT)


SCENES = (
    first_put,
    put_into_nothing,
    put_from_another_disk,
    put_of_a_known_key,
    put_over_a_damaged_one,
    put_over_one_without_manifest,
)


def whole(store: Path) -> dict[str, bytes] | None:
    """What a new process finds under the key; a damaged artifact counts as none, for it is never taken for whole."""
    opened = quick(store)
    with suppress(ArtifactCorrupted):
        ref = opened.find("scores", "k")
        return None if ref is None else read(opened.fetch(ref))
    return None


def put(scene: Scene, files: FaultyFiles) -> ArtifactRef:
    return quick(scene.store, files).put(scene.folder, "scores", "k")


@pytest.mark.parametrize("fault", EACH)
@pytest.mark.parametrize("make_scene", SCENES)
def test_put_is_all_or_nothing_at_every_operation(tmp_path: Path, make_scene: Callable[[Path], Scene], fault: str):
    scene = make_scene(tmp_path / "count")
    counting = FaultyFiles(other_disk=scene.other_disk)
    put(scene, counting)
    assert len(counting.trace) > 2
    for number in range(1, len(counting.trace) + 1):
        scene = make_scene(tmp_path / str(number))
        before = whole(scene.store)
        with suppress(OSError, Died):
            put(scene, FaultyFiles(number, fault, other_disk=scene.other_disk))
        after = whole(scene.store)
        assert after in (before, scene.expected), f"operation {number}: {counting.trace[number - 1]}"
        if after is None:
            assert read(scene.folder) == CONTENT, "neither stored nor kept"
        ref = put(scene, FaultyFiles(other_disk=scene.other_disk))
        assert read(quick(scene.store).fetch(ref)) == scene.expected
        assert not scene.folder.exists()


@pytest.mark.parametrize("fault", EACH)
def test_set_aside_keeps_the_damaged_one_at_every_operation(tmp_path: Path, fault: str):
    for number in itertools.count(1):
        scene = put_over_a_damaged_one(tmp_path / str(number))
        faulty = FaultyFiles(number, fault)
        with suppress(OSError, Died):
            quick(scene.store, faulty).set_aside("scores", "k")
        quick(scene.store).set_aside("scores", "k")
        assert not (scene.store / "scores/k").exists()
        assert read(scene.store / "damaged/scores-k-1") == {"a.txt": b"Somebody was faster"}
        if len(faulty.trace) < number:
            assert number > 2  # else nothing was interrupted
            break
