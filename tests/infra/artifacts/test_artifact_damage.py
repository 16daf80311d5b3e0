"""Damage to stored artifacts: found in every case, said clearly, kept aside, made good."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.artifacts import ArtifactCorrupted, ArtifactFormatTooNew, ArtifactRef, ArtifactStore, open_store
from infra.artifacts.local_store import LocalStore
from infra.storage.filesystem import LocalFiles, Status
from tests.infra.artifacts.artifact_folders import CONTENT, put, read


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store(tmp_path / "store")


def damage(place: Path, dice: random.Random) -> str:
    """One flipped bit, cut, missing or extra file; says what it did."""
    path = dice.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    how = dice.choice(["flip", "cut", "remove", "extra", "grow"])
    if how == "remove":
        path.unlink()
        return f"{how} {path.name}"
    if how == "extra":
        (path.parent / f"extra-{dice.randrange(9)}").write_bytes(bytes(data))
        return how
    path.chmod(0o644)
    if how == "flip":
        where = dice.randrange(len(data))
        data[where] ^= 1 << dice.randrange(8)
    path.write_bytes(bytes(data) + b" " if how == "grow" else bytes(data) if how == "flip" else bytes(data[:-1]))
    return f"{how} {path.name}"


def is_whole(store: ArtifactStore, ref: ArtifactRef) -> bool:
    try:
        store.fetch(ref)
    except ArtifactCorrupted:
        return False
    return True


def test_damage_is_found_in_every_case(tmp_path: Path):
    store = LocalStore(tmp_path / "store", libraries={"torch": "2.13.0"})
    ref = put(store, "k1", CONTENT, (ArtifactRef(kind="scores", uri="file:///a/scores/s", digest="d"),))
    place = store.fetch(ref)
    shutil.copytree(place, tmp_path / "good")
    for seed in range(600):
        what = damage(place, random.Random(seed))
        assert not is_whole(store, ref), f"seed {seed}: {what} went unnoticed"
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "good", place)
        assert store.fetch(ref) == place


def test_a_complaint_names_file_expected_and_found(store: ArtifactStore):
    ref = put(store, "k1", CONTENT)
    path = store.fetch(ref) / "state.json"
    path.chmod(0o644)
    path.write_bytes(b"short")
    with pytest.raises(ArtifactCorrupted, match=r"checkpoint/k1: file state.json: expected 11 bytes, found 5 bytes"):
        store.find("checkpoint", "k1")
    path.write_bytes(b'{"step": 7}')
    assert store.find("checkpoint", "k1") == ref, "find looks at sizes only"
    with pytest.raises(ArtifactCorrupted, match=r"file state.json: expected sha256 \w+, found sha256 \w+"):
        store.fetch(ref)
    (path.parent / "manifest.json").unlink()
    assert store.find("checkpoint", "k1") is None
    with pytest.raises(ArtifactCorrupted, match=r"manifest.json"):
        store.fetch(ref)


class ClockedFiles(LocalFiles):
    """Counts what is read, and says itself when files were changed."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.changed_ns = 0

    def blocks(self, path: Path) -> Iterator[bytes]:
        self.reads.append(path.name)
        return super().blocks(path)

    def status(self, path: Path) -> Status | None:
        found = super().status(path)
        return None if found is None else replace(found, changed_ns=self.changed_ns)


def test_a_check_is_remembered_until_a_file_changes(tmp_path: Path):
    files = ClockedFiles()
    store = LocalStore(tmp_path, files=files, libraries={})
    ref = put(store, "k1", {"x.bin": b"content"})
    store.fetch(ref)
    files.reads.clear()
    store.fetch(ref)
    assert files.reads == ["manifest.json"]
    files.changed_ns = 1
    store.fetch(ref)
    assert files.reads.count("x.bin") == 1
    path = tmp_path / "checkpoint/k1/x.bin"
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    files.changed_ns = 2
    with pytest.raises(ArtifactCorrupted, match=r"x\.bin"):
        store.fetch(ref)


def test_a_check_of_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path):
    files = ClockedFiles()
    store = LocalStore(tmp_path, files=files, libraries={})
    ref = put(store, "k1", {"x.bin": b"content"})
    files.changed_ns = time.time_ns() + 10**12
    for number in range(1, 4):
        files.reads.clear()
        store.fetch(ref)
        assert files.reads.count("x.bin") == 1, f"fetch {number}"


class SlowFiles(LocalFiles):
    """Counts what is read, which takes longer than the time stamps of files are apart."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def blocks(self, path: Path) -> Iterator[bytes]:
        self.reads.append(path.name)
        time.sleep(0.02)
        return super().blocks(path)


def test_what_this_process_has_just_stored_is_not_read_again_until_it_changes(tmp_path: Path):
    files = SlowFiles()
    store = LocalStore(tmp_path, files=files, libraries={})
    ref = put(store, "k1", {"x.bin": b"content"})
    files.reads.clear()
    path = store.fetch(ref) / "x.bin"
    assert files.reads == ["manifest.json"]
    times = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"CONTENT")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ArtifactCorrupted, match=r"x\.bin"):
        store.fetch(ref)


class Meeting(LocalFiles):
    """Lets somebody else act for a while just before a damaged artifact is moved."""

    def __init__(self, other: threading.Thread) -> None:
        self._other = other

    def rename(self, source: Path, target: Path) -> None:
        if target.parent.name == "damaged":
            self._other.start()
            self._other.join(0.5)
        super().rename(source, target)


def test_what_another_process_has_made_again_is_not_moved_away(tmp_path: Path, store: ArtifactStore):
    ref = put(store, "k1", CONTENT)
    (store.fetch(ref) / "state.json").unlink()
    other = threading.Thread(target=put, args=(open_store(store.root), "k1", CONTENT))
    LocalStore(Path(store.root), files=Meeting(other)).set_aside("checkpoint", "k1")
    other.join()
    assert read(store.fetch(ref)) == CONTENT
    assert os.listdir(Path(store.root) / "damaged") == ["checkpoint-k1-1"]


def test_a_damaged_one_is_kept_aside_and_made_again(store: ArtifactStore):
    assert store.set_aside("checkpoint", "k1") is None
    ref = put(store, "k1", CONTENT)
    assert store.set_aside("checkpoint", "k1") is None
    for number, by_put in ((1, False), (2, True)):
        (store.fetch(ref) / "state.json").unlink()
        if not by_put:
            assert store.set_aside("checkpoint", "k1") == Path(store.root) / f"damaged/checkpoint-k1-{number}"
        assert put(store, "k1", CONTENT) == ref
        assert read(store.fetch(ref)) == CONTENT
    assert sorted(os.listdir(Path(store.root) / "damaged")) == ["checkpoint-k1-1", "checkpoint-k1-2"]


def rewrite(place: Path, changes: dict[str, object], *, checksum: bool) -> None:
    path = place / "manifest.json"
    document = {**json.loads(path.read_text()), **changes}
    if checksum:
        body = {name: value for name, value in document.items() if name != "checksum"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        document["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    path.chmod(0o644)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def test_a_newer_format_says_who_can_read_it(store: ArtifactStore):
    ref = put(store, "k1", CONTENT)
    place = store.fetch(ref)
    rewrite(place, {"format": 2, "libraries": {"ppoflow": "0.9.0"}, "news": 1}, checksum=True)
    with pytest.raises(ArtifactFormatTooNew, match=r"format 2.*up to format 1.*ppoflow 0\.9\.0 or newer"):
        store.fetch(ref)
    with pytest.raises(ArtifactFormatTooNew):
        put(store, "k1", CONTENT)
    rewrite(place, {"format": 2, "libraries": {}}, checksum=False)
    with pytest.raises(ArtifactCorrupted, match=r"format 2.*reads manifest format 2; or it is damaged"):
        store.fetch(ref)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a//b", "a/../b"])
def test_a_manifest_cannot_name_files_outside(store: ArtifactStore, name: str):
    ref = put(store, "k1", CONTENT)
    rewrite(store.fetch(ref), {"files": {name: {"sha256": "0" * 64, "size": 1}}}, checksum=True)
    with pytest.raises(ArtifactCorrupted, match="leaves the artifact's folder"):
        store.fetch(ref)
