"""The local copies of a remote store: shared, limited, and never wrong."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.integrity import describe
from infra.artifacts.manifest import Manifest
from infra.process_identity import this_process
from infra.storage.filesystem import LocalFiles, StoreReadOnly
from tests.infra.artifacts.artifact_folders import CONTENT, fill, read
from tests.infra.programs import Program
from tests.infra.storage.faulty_files import FAULTS, Died, FaultyFiles

MANY = 10**9


def manifest_of(folder: Path) -> Manifest:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return describe(LocalFiles(), folder, names, "scores", "k", (), {})[0]


def filler(content: dict[str, bytes]) -> Callable[[Path], Manifest]:
    return lambda folder: manifest_of(fill(folder, content))


def digest_of(content: dict[str, bytes], scratch: Path) -> str:
    return manifest_of(fill(scratch, content)).digest


def sized(number: int, size: int = 1000) -> dict[str, bytes]:
    return {"x": str(number).encode() * size}


def refuse(folder: Path) -> Manifest:
    raise AssertionError("it is there already")


class Clock:
    def __init__(self) -> None:
        self.time = 1e9

    def __call__(self) -> float:
        return self.time


def test_what_was_filled_is_kept(tmp_path: Path):
    cache = ArtifactCache(tmp_path / "cache", MANY)
    digest = digest_of(CONTENT, tmp_path / "x")
    assert cache.get(digest) is None
    assert not (tmp_path / "cache").exists()
    place = cache.get_or_fill(digest, filler(CONTENT))
    assert read(place) == CONTENT
    for again in (cache, ArtifactCache(tmp_path / "cache", MANY)):
        assert again.get(digest) == again.get_or_fill(digest, refuse) == place
    assert list((tmp_path / "cache/scratch").iterdir()) == []


def test_a_folder_is_taken_as_it_is(tmp_path: Path):
    cache = ArtifactCache(tmp_path / "cache", MANY)
    folder = fill(cache.scratch(), CONTENT)
    manifest, inode = manifest_of(folder), (folder / "state.json").stat().st_ino
    cache.take(folder, manifest)
    place = cache.get(manifest.digest)
    assert place is not None
    assert (place / "state.json").stat().st_ino == inode
    assert not folder.exists()
    cache.take(again := fill(cache.scratch(), CONTENT), manifest)
    assert not again.exists()


@pytest.mark.parametrize("how", ["flipped", "cut", "lost", "more", "no manifest", "bad manifest"])
def test_a_damaged_copy_is_fetched_again(tmp_path: Path, how: str):
    cache = ArtifactCache(tmp_path / "cache", MANY)
    digest = digest_of(CONTENT, tmp_path / "x")
    place = cache.get_or_fill(digest, filler(CONTENT))
    path = place / ("manifest.json" if "manifest" in how else "state.json")
    content = path.read_bytes()
    path.chmod(0o644)
    if how == "more":
        (place / "extra").write_bytes(b"x")
    elif how in ("lost", "no manifest"):
        path.unlink()
    else:
        path.write_bytes(content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    assert cache.get(digest) is None, "though it was found good before"
    assert read(cache.get_or_fill(digest, filler(CONTENT))) == CONTENT
    assert list((tmp_path / "cache/trash").iterdir()) == []


class BadSector(LocalFiles):
    """The disk gives back nothing of one file."""

    def __init__(self, path: Path) -> None:
        self.inode = path.stat().st_ino

    def blocks(self, path: Path) -> Iterator[bytes]:
        if path.stat().st_ino == self.inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().blocks(path)


def test_a_copy_that_the_disk_does_not_give_back_is_fetched_again(tmp_path: Path):
    digest = digest_of(CONTENT, tmp_path / "x")
    place = ArtifactCache(tmp_path / "cache", MANY).get_or_fill(digest, filler(CONTENT))
    os.link(place / "state.json", tmp_path / "held")  # or the new copy might get its inode
    cache = ArtifactCache(tmp_path / "cache", MANY, files=BadSector(place / "state.json"))
    assert cache.get(digest) is None
    assert read(cache.get_or_fill(digest, filler(CONTENT))) == CONTENT


def test_those_fetched_longest_ago_go_first_and_none_that_is_in_use(tmp_path: Path):
    clock = Clock()
    cache = ArtifactCache(tmp_path / "cache", 10_000, held_s=100, now=clock)
    contents = [sized(number) for number in range(9)]
    digests = [digest_of(content, tmp_path / str(number)) for number, content in enumerate(contents)]

    def there() -> list[int]:
        return [number for number, digest in enumerate(digests) if (tmp_path / "cache/artifacts" / digest).is_dir()]

    for number in range(5):
        clock.time += 10
        cache.get_or_fill(digests[number], filler(contents[number]))
    # Each is a thousand bytes and its manifest; all are in use.
    assert there() == [0, 1, 2, 3, 4]
    clock.time += 200
    assert cache.get(digests[1]) is not None
    cache.get_or_fill(digests[5], filler(contents[5]))
    assert 1 in there(), "it was fetched again"
    for number in range(6, 9):
        clock.time += 1
        cache.get_or_fill(digests[number], filler(contents[number]))
    size = sum(path.stat().st_size for path in (tmp_path / "cache/artifacts").rglob("*") if path.is_file())
    assert size <= 10_000
    assert {1, 5, 6, 7, 8} <= set(there())
    assert 0 not in there()


def test_room_is_made_before_a_download(tmp_path: Path):
    clock = Clock()
    cache = ArtifactCache(tmp_path / "cache", 10_000, now=clock)
    digest = digest_of(CONTENT, tmp_path / "x")
    cache.get_or_fill(digest, filler(CONTENT))
    clock.time += 3600
    cache.make_room(5_000)
    assert cache.get(digest) is not None
    clock.time += 3600
    cache.make_room(9_990)
    assert cache.get(digest) is None


def test_one_of_many_fills_and_the_others_wait(tmp_path: Path):
    digest = digest_of(CONTENT, tmp_path / "x")
    fills = []

    def fetch(number: int) -> Path:
        def make(folder: Path) -> Manifest:
            fills.append(number)
            return filler(CONTENT)(folder)

        return ArtifactCache(tmp_path / "cache", MANY).get_or_fill(digest, make)

    with ThreadPoolExecutor(8) as pool:
        places = set(pool.map(fetch, range(8)))
    assert len(places) == len(fills) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from infra.artifacts.download_cache import ArtifactCache

def fill(folder):
    (folder / "state.json").write_bytes(b"half of it")
    print(folder, flush=True)
    sys.stdin.readline()

ArtifactCache(Path(sys.argv[1]), 10**9).get_or_fill(sys.argv[2], fill)
"""


def test_who_is_killed_while_filling_leaves_nothing_behind(tmp_path: Path):
    digest = digest_of(CONTENT, tmp_path / "x")
    with Program(KILLED, str(tmp_path / "cache"), digest) as program:
        (folder,) = program.hear()
        assert Path(folder).is_dir()
    cache = ArtifactCache(tmp_path / "cache", MANY)
    mine = cache.scratch()
    assert read(cache.get_or_fill(digest, filler(CONTENT))) == CONTENT
    assert list((tmp_path / "cache/scratch").iterdir()) == [mine]
    assert mine.name.startswith(this_process().token)


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_right_after_a_fault_at_any_operation(tmp_path: Path, fault: str):
    digest = digest_of(CONTENT, tmp_path / "x")
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        faulty = FaultyFiles(number, fault)
        with suppress(OSError, Died, StoreReadOnly):
            assert read(ArtifactCache(folder, MANY, files=faulty).get_or_fill(digest, filler(CONTENT))) == CONTENT
        cache = ArtifactCache(folder, MANY)
        found = cache.get(digest)
        assert found is None or read(found) == CONTENT
        assert read(cache.get_or_fill(digest, filler(CONTENT))) == CONTENT
        if len(faulty.trace) < number:
            assert number > 2  # else nothing was interrupted
            break


class ReadOnlyFiles(LocalFiles):
    def writable(self, folder: Path) -> bool:
        return False


def test_a_folder_that_cannot_be_written_to(tmp_path: Path):
    cache = ArtifactCache(tmp_path, MANY, files=ReadOnlyFiles())
    with pytest.raises(StoreReadOnly, match=rf"the cache {tmp_path} cannot be written to .*PPOFLOW_CACHE"):
        cache.scratch()


class OfAnotherUser(LocalFiles):
    """What is there can be read."""

    def rename(self, source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source), None, str(target))


def test_a_damaged_copy_that_cannot_be_taken_away_says_which_cache_cannot_be_written_to(tmp_path: Path):
    digest = digest_of(CONTENT, tmp_path / "x")
    place = ArtifactCache(tmp_path / "cache", MANY).get_or_fill(digest, filler(CONTENT))
    (place / "extra").write_bytes(b"x")
    with pytest.raises(StoreReadOnly, match=rf"the cache {tmp_path}/cache cannot be written to .*PPOFLOW_CACHE"):
        ArtifactCache(tmp_path / "cache", MANY, files=OfAnotherUser()).get(digest)


def test_what_may_not_be_put_from_there(tmp_path: Path):
    cache = ArtifactCache(tmp_path / "cache", MANY)
    scratch = cache.scratch()
    assert not cache.owns(scratch)
    assert not cache.owns(tmp_path / "elsewhere")
    for folder in (tmp_path, tmp_path / "cache", scratch.parent, tmp_path / "cache/artifacts/x"):
        assert cache.owns(folder)
    assert os.listdir(tmp_path / "cache") == ["scratch"]
