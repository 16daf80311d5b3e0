"""Bytes that change on the way from S3 are read again, and never taken for an object that is damaged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from urllib3.exceptions import SSLError

from infra.artifacts import ArtifactCorrupted, ArtifactRef
from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.s3_store import S3Store
from infra.mlflow.alias_journal import Journal, Move
from infra.runs.checksummed_json import RecordCorrupted
from infra.runs.s3_lease import acquire_lease
from infra.runs.s3_runs import S3Runs
from infra.storage.error_translation import read_answer, translate_errors
from infra.storage.objects import Found, S3Address, StoreUnavailable
from infra.storage.rereading import ChangedOnTheWay, read_again
from infra.storage.telling import messages_to
from infra.storage.write_once_objects import S3Pages
from tests.infra.artifacts.artifact_folders import fill, read
from tests.infra.runs.leases import somebody
from tests.infra.storage.s3.memory_objects import MemoryObjects

ADDRESS = S3Address("memory", "team")
CONTENT = {"data": b"0.5 " * 100}
PLACES = ("head.json", "iterations/", "manifest.json", "data")
Change = Callable[[bytes], bytes]


def the_same() -> Change:
    """A device that flips the same bit each time."""
    return lambda content: flipped(content, len(content) // 2)


def others() -> Change:
    """One that flips another bit each time."""
    numbers = itertools.count(20)
    return lambda content: flipped(content, next(numbers) % len(content))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


class FlippingObjects(MemoryObjects):
    """A bucket; of the objects whose keys hold `where`, the next `times` reads arrive changed."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.left, self.change = "", 0, the_same()

    def flip(self, where: str, times: int, change: Change) -> None:
        """From now on."""
        self.where, self.left, self.change = where, times, change

    def read(self, key: str) -> Found | None:
        found = super().read(key)
        if found is None or self.where not in key or self.left == 0:
            return found
        self.left -= 1
        return Found(self.change(found.content), found.etag)


@pytest.fixture
def objects() -> FlippingObjects:
    """With a run and an artifact."""
    objects = FlippingObjects()
    lease = acquire_lease("s3://memory/team", "r", objects=objects, identity=somebody(), alive=lambda _: False)
    records = S3Runs(ADDRESS, objects).records("r", lease=lease)
    records.create_spec({"seed": 1})
    records.commit(0, {"iteration": 0})
    lease.release()
    return objects


def store(objects: MemoryObjects, cache: Path) -> S3Store:
    return S3Store(ADDRESS, objects, ArtifactCache(cache, 2**30), libraries={})


def put(objects: MemoryObjects, home: Path) -> ArtifactRef:
    writer = store(objects, home / "writer")
    return writer.put(fill(writer.scratch(), CONTENT), "scores", "k")


def everything(objects: MemoryObjects, ref: ArtifactRef, cache: Path) -> None:
    """Read the run and the artifact, on a machine that has nothing."""
    assert S3Runs(ADDRESS, objects).records("r").all() == [{"iteration": 0}]
    there = store(objects, cache)
    assert there.find("scores", "k") == ref
    assert read(there.fetch(ref)) == CONTENT


@pytest.mark.parametrize("change", [the_same, others])
@pytest.mark.parametrize("where", PLACES)
def test_what_comes_right_the_next_time_is_no_error(
    objects: FlippingObjects, tmp_path: Path, where: str, change: Callable[[], Change]
) -> None:
    ref = put(objects, tmp_path)
    objects.flip(where, 2, change())
    said: list[str] = []
    with messages_to(said.append):
        everything(objects, ref, tmp_path / "there")
    assert objects.left == 0
    assert all("arrived wrong and was read again" in text for text in said)
    assert bool(said) == (where != "data")


@pytest.mark.parametrize("change", [the_same, others])
@pytest.mark.parametrize("where", PLACES)
def test_what_never_comes_right_though_it_lies_right_is_told_as_what_it_is(
    objects: FlippingObjects, tmp_path: Path, where: str, change: Callable[[], Change]
) -> None:
    ref = put(objects, tmp_path)
    before = dict(objects.content)
    objects.flip(where, 10**6, change())
    with pytest.raises(ChangedOnTheWay, match=r"changed on its way from S3.*have the network looked at") as caught:
        everything(objects, ref, tmp_path / "there")
    assert "earlier version" not in str(caught.value)
    with pytest.raises(ChangedOnTheWay):
        everything(objects, ref, tmp_path / "there")
    if where in ("manifest.json", "data"):
        with pytest.raises(ChangedOnTheWay):
            store(objects, tmp_path / "mender").set_aside("scores", "k")
    assert objects.content == before
    objects.flip("", 0, the_same())
    everything(objects, ref, tmp_path / "there")


@pytest.mark.parametrize(
    ("where", "complaint", "remedy"),
    [
        ("head.json", RecordCorrupted, r"put back its last undamaged version \(what was committed after that"),
        ("iterations/", RecordCorrupted, "put back an earlier version of this object"),
        ("manifest.json", ArtifactCorrupted, "set it aside and make it again"),
        ("data", ArtifactCorrupted, "expected sha256"),
    ],
)
def test_what_lies_wrong_is_damaged(
    objects: FlippingObjects, tmp_path: Path, where: str, complaint: type[Exception], remedy: str
) -> None:
    ref = put(objects, tmp_path)
    for key in [key for key in objects.content if where in key]:
        objects.write(key, flipped(objects.content[key], len(objects.content[key]) // 2))
    with pytest.raises(complaint, match=remedy):
        everything(objects, ref, tmp_path / "there")


def test_an_etag_that_is_no_md5_proves_nothing(tmp_path: Path) -> None:
    """With a key of the user's own S3 gives ETags that only look like md5s: what is the same each time lies wrong."""

    class OwnKey(MemoryObjects):
        def read(self, key: str) -> Found | None:
            found = super().read(key)
            return None if found is None else Found(found.content, "0" * 32, etag_is_md5=False)

    objects = OwnKey()
    objects.write("a", b"wrong")
    with pytest.raises(ValueError, match="invalid literal"):
        read_again(objects, "a", lambda content: int(content), ValueError)


def journal(objects: MemoryObjects) -> Journal:
    """That of a model, of which nothing was read yet."""
    return Journal(S3Pages(objects, "team/promotions/m/"), "m")


@pytest.mark.parametrize("change", [the_same, others])
def test_a_page_that_changes_on_the_way_is_not_damaged(objects: FlippingObjects, change: Callable[[], Change]) -> None:
    move = Move(number=1, model="m", alias="champion", action="promote", version="1", before=None, by="anna", at_ms=1)
    assert journal(objects).append(move)
    objects.flip("promotions", 2, change())
    assert journal(objects).moves() == [move]
    objects.flip("promotions", 10**6, change())
    with pytest.raises(ChangedOnTheWay, match="have the network looked at"):
        journal(objects).moves()
    objects.flip("", 0, the_same())
    (key,) = (key for key in objects.content if "promotions" in key)
    objects.write(key, flipped(objects.content[key], 30))
    with pytest.raises(RecordCorrupted, match="bring it back from a copy"):
        journal(objects).moves()


@pytest.mark.parametrize("lasting", [False, True])
def test_what_tls_finds_changed_in_an_answer_is_asked_for_anew(lasting: bool):
    asked: list[int] = []

    def read(answer: int) -> int:
        if answer == 1 or lasting:
            raise SSLError("[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]")
        return answer

    def ask() -> int:
        asked.append(1)
        return len(asked)

    if lasting:
        with pytest.raises(StoreUnavailable, match="DECRYPTION_FAILED"), translate_errors("bucket", "read", "k"):
            read_answer(ask, read, 3)
        assert len(asked) == 3
    else:
        assert read_answer(ask, read, 3) == 2
