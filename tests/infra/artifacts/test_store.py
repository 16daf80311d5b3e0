"""The store on S3: who wins, what is copied where, what is asked of S3, and what is done about damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import (
    ArtifactCorrupted,
    ArtifactFormatTooNew,
    ArtifactMissing,
    ArtifactRef,
    StoreReadOnly,
)
from infra.artifacts.manifest import sha256_of
from infra.artifacts.s3_files import uploads_below
from infra.artifacts.s3_store import S3Store
from tests.infra.artifacts.artifact_folders import CONTENT, put, read
from tests.infra.artifacts.stores import PREFIX, Behind, machine
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.s3_server import S3Server


@pytest.fixture
def behind(s3_server: S3Server) -> Behind:
    return Behind(s3_server.objects(s3_server.make_bucket()))


@pytest.fixture
def store(behind: Behind, tmp_path: Path) -> S3Store:
    return machine(behind.objects, tmp_path / "here")


@pytest.fixture
def other(behind: Behind, tmp_path: Path) -> S3Store:
    return machine(behind.objects, tmp_path / "elsewhere")


def test_what_it_asks_of_s3(behind: Behind, tmp_path: Path):
    objects = FaultyObjects(behind.objects)
    store = machine(objects, tmp_path / "here")
    place = f"{PREFIX}/checkpoint/k1"
    ref = put(store, "k1", CONTENT)
    first, *uploads, last = objects.trace
    assert (first, last) == (f"read {place}/manifest.json", f"create {place}/manifest.json")
    assert [line.split("/", 5)[5] for line in uploads] == sorted(CONTENT)
    objects.trace.clear()
    assert read(store.fetch(ref)) == CONTENT
    assert objects.trace == [], "what this machine has made is never downloaded"
    assert store.find("checkpoint", "k1") == ref
    assert objects.trace == [f"read {place}/manifest.json"]
    elsewhere = FaultyObjects(behind.objects)
    other = machine(elsewhere, tmp_path / "elsewhere")
    for _ in range(2):
        assert read(other.fetch(ref)) == CONTENT
    assert [line.split()[0] for line in elsewhere.trace] == ["read", *["download"] * len(CONTENT)]
    again = machine(FaultyObjects(behind.objects, 1, "fails from then on"), tmp_path / "elsewhere")
    assert read(again.fetch(ref)) == CONTENT


def test_its_layout(store: S3Store, behind: Behind):
    ref = put(store, "k1", CONTENT)
    state, upload = behind.state(ref)
    assert state == "live"
    assert behind.keys("checkpoint/k1/") == sorted(["manifest.json", *(f"{upload}/{name}" for name in CONTENT)])
    assert store.root == f"s3://{behind.bucket}/{PREFIX}"
    assert ref.uri == f"{store.root}/checkpoint/k1"
    assert store.location(ref) == f"{ref.uri}/{upload}"


def test_the_copy_that_is_fetched_is_read_only(store: S3Store, other: S3Store):
    ref = put(store, "k1", CONTENT)
    for here in (store, other):
        files = [path for path in here.fetch(ref).rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o777 for path in files} == {0o444}


def test_what_is_marked_is_there_and_is_saved_by_who_wants_it(store: S3Store, other: S3Store, behind: Behind):
    ref = put(store, "k1", CONTENT)
    behind.move(ref, "marked")
    assert read(other.fetch(ref)) == CONTENT
    assert other.manifest(ref).digest == ref.digest
    assert behind.state(ref) == ("marked", other.location(ref).rpartition("/")[2])
    assert other.find("checkpoint", "k1") == ref
    assert behind.state(ref)[0] == "live"
    behind.move(ref, "marked")
    assert put(other, "k1", {"other": b"content"}) == ref
    assert behind.state(ref)[0] == "live"


def test_what_is_gone_is_not_there_and_can_be_made_again(store: S3Store, other: S3Store, behind: Behind):
    ref = put(store, "k1", CONTENT)
    _, before = behind.state(ref)
    behind.move(ref, "marked", "gone")
    assert other.find("checkpoint", "k1") is None
    assert other.set_aside("checkpoint", "k1") is None
    with pytest.raises(ArtifactMissing):
        other.fetch(ref)
    assert put(other, "k1", CONTENT) == ref
    state, now = behind.state(ref)
    assert (state, now != before) == ("live", True)
    # What a collector that died had left to remove belongs to nobody.
    (left,) = uploads_below(behind.objects, behind.address, "checkpoint", "k1").unnamed
    assert (left.prefix, left.bytes) == (f"{PREFIX}/checkpoint/k1/{before}/", sum(map(len, CONTENT.values())))


BREAKS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "lost": lambda content: None,
}


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("flipped", r"expected sha256 \w+, found sha256 \w+"),
        ("cut", "expected 11 bytes, found 10 bytes"),
        ("longer", "expected 11 bytes, found 12 bytes"),
        ("lost", "expected 11 bytes, found no such file"),
    ],
)
def test_a_damaged_file(store: S3Store, other: S3Store, behind: Behind, tmp_path: Path, how: str, complaint: str):
    ref = put(store, "k1", CONTENT)
    upload = behind.state(ref)[1]
    behind.change(f"checkpoint/k1/{upload}/state.json", BREAKS[how])
    with pytest.raises(ArtifactCorrupted, match=f"checkpoint/k1: file state.json: {complaint}: set it aside"):
        other.fetch(ref)
    if how == "flipped":
        place = other.set_aside("checkpoint", "k1", digest=ref.digest)
        assert place == f"s3://{behind.bucket}/{PREFIX}/damaged/checkpoint-k1-{upload}"
        assert other.find("checkpoint", "k1") is None
    assert put(other, "k1", CONTENT) == ref
    kept = set(behind.keys(f"damaged/checkpoint-k1-{upload}/"))
    assert kept == {"manifest.json", *CONTENT} - ({"state.json"} if how == "lost" else set())
    assert behind.keys(f"checkpoint/k1/{upload}/") == []
    assert read(machine(behind.objects, tmp_path / "third").fetch(ref)) == CONTENT


ENVELOPE = "checkpoint/k1/manifest.json"


def with_checksum(content: bytes, **changes: object) -> bytes:
    document = {**json.loads(content), **changes}
    document["checksum"] = sha256_of({name: value for name, value in document.items() if name != "checksum"})
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda content: content[:-20], "is no JSON"),
        (lambda content: b"[]", "is no JSON object"),
        (lambda content: b"", "is no JSON"),
        (lambda content: content.replace(b'"live"', b'"gone"'), "its own checksum"),
        (lambda content: with_checksum(content, upload="../.."), "is not an artifact's state"),
        (lambda content: with_checksum(content, manifest={}), "is not a manifest"),
    ],
)
def test_a_damaged_manifest(
    store: S3Store, other: S3Store, behind: Behind, change: Callable[[bytes], bytes], complaint: str
):
    ref = put(store, "k1", CONTENT)
    upload = behind.state(ref)[1]
    behind.change(ENVELOPE, change)
    with pytest.raises(ArtifactCorrupted, match=complaint):
        other.find("checkpoint", "k1")
    with pytest.raises(ArtifactCorrupted, match=complaint):
        other.fetch(ref)
    place = other.set_aside("checkpoint", "k1")
    assert place is not None
    assert other.find("checkpoint", "k1") is None
    assert put(other, "k1", CONTENT) == ref
    kept = set(behind.keys(place.split(f"{PREFIX}/")[1] + "/"))
    assert {name.removeprefix(f"{upload}/") for name in kept} == {"manifest.json", *CONTENT}


def test_a_newer_format_is_neither_read_nor_replaced(store: S3Store, behind: Behind):
    put(store, "k1", CONTENT)
    behind.change(ENVELOPE, lambda content: with_checksum(content, format=2, news=1))
    for call in (store.find, store.set_aside, lambda kind, key: put(store, key, CONTENT)):
        with pytest.raises(ArtifactFormatTooNew, match="format 2 on S3, this version reads up to format 1"):
            call("checkpoint", "k1")


class Meeting(FaultyObjects):
    """Lets somebody else act just before the first download."""

    act: Callable[[], object] | None = None

    def download(self, wanted: Any) -> Any:
        if self.act is not None:
            act, self.act = self.act, None
            act()
        return super().download(wanted)


def bury(behind: Behind, ref: ArtifactRef) -> None:
    behind.move(ref, "gone")
    objects = behind.objects
    objects.remove([entry.key for entry in objects.entries(f"{PREFIX}/checkpoint/k1/") if "manifest" not in entry.key])


def test_what_is_taken_away_while_it_is_fetched_is_missing(store: S3Store, behind: Behind, tmp_path: Path):
    ref = put(store, "k1", CONTENT)
    objects = Meeting(behind.objects)
    objects.act = lambda: bury(behind, ref)
    with pytest.raises(ArtifactMissing):
        machine(objects, tmp_path / "third").fetch(ref)
    assert list((tmp_path / "third/scratch").iterdir()) == []


def test_what_is_made_again_while_it_is_fetched_is_fetched_from_there(store: S3Store, behind: Behind, tmp_path: Path):
    ref = put(store, "k1", CONTENT)
    objects = Meeting(behind.objects)
    objects.act = lambda: (bury(behind, ref), put(store, "k1", CONTENT))
    assert read(machine(objects, tmp_path / "third").fetch(ref)) == CONTENT


def test_a_cache_that_cannot_be_written_to_says_so(behind: Behind, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    store = machine(behind.objects, tmp_path / "file")
    with pytest.raises((StoreReadOnly, NotADirectoryError), match="file"):
        store.scratch()
