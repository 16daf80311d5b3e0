"""Eight writers of one key at once: one commit, which all the others take over (200 rounds: `benchmarks.s3_races`)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef
from infra.artifacts.integrity import describe
from infra.artifacts.s3_store import S3Store
from infra.storage.filesystem import LocalFiles
from tests.infra.artifacts.artifact_folders import fill, read
from tests.infra.artifacts.stores import Behind, machine
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.infra.storage.s3.s3_server import S3Server
from tests.waiting import LONG_S

WRITERS, ROUNDS = 8, 6


def race(behind: Behind, stores: list[S3Store], key: str) -> None:
    start = threading.Barrier(WRITERS)

    def write(number: int) -> ArtifactRef:
        store = stores[number % len(stores)]
        folder = fill(store.scratch(), {"who": str(number).encode()})
        start.wait()
        return store.put(folder, "scores", key)

    with ThreadPoolExecutor(WRITERS) as pool:
        refs = list(pool.map(write, range(WRITERS)))
    assert len(set(refs)) == 1
    state, upload = behind.state(refs[0])
    assert state == "live"
    assert behind.keys(f"scores/{key}/") == sorted([f"{upload}/who", "manifest.json"]), "the losers take theirs away"
    contents = {read(store.fetch(refs[0]))["who"] for store in stores}
    assert len(contents) == 1


@pytest.mark.parametrize(("rounds", "real"), [(100, False), (4, True)])
def test_one_of_eight_writers_wins_each_round(s3_server: S3Server, tmp_path: Path, rounds: int, real: bool):
    behind = Behind(s3_server.objects(s3_server.make_bucket()) if real else MemoryObjects())
    stores = [machine(behind.objects, tmp_path / name) for name in ("here", "elsewhere")]
    for number in range(rounds):
        race(behind, stores, f"k{number}")


def test_writers_and_collectors(s3_server: S3Server, tmp_path: Path):
    """Three writers, while somebody buries what is there: each is told of what one of them has written, whole."""
    behind = Behind(s3_server.objects(s3_server.make_bucket()))
    stores = [machine(behind.objects, tmp_path / str(number)) for number in range(4)]
    wrong, written = "0" * 64, set[str]()
    stop = threading.Event()

    def bury() -> int:
        count = 0
        while not stop.is_set():
            count += stores[3].set_aside("scores", "k", digest=wrong) is not None
        return count

    with ThreadPoolExecutor(WRITERS) as pool:
        burying = pool.submit(bury)
        try:
            for number in range(ROUNDS):
                folders = [fill(s.scratch(), {"who": b"%d-%d" % (number, who)}) for who, s in enumerate(stores[:3])]
                written |= {digest_of(folder) for folder in folders}
                refs = list(pool.map(lambda store, folder: store.put(folder, "scores", "k"), stores[:3], folders))
                assert {ref.digest for ref in refs} <= written
        finally:
            stop.set()
        assert burying.result(LONG_S) >= 1
    ref = stores[0].put(fill(stores[0].scratch(), {"who": b"0-0"}), "scores", "k")
    last = read(machine(behind.objects, tmp_path / "last").fetch(ref))
    assert last in [{"who": b"%d-%d" % (number, who)} for number in range(ROUNDS) for who in range(3)]
    assert ref.digest in written


def digest_of(folder: Path) -> str:
    """Of an artifact of these files."""
    names = [path.name for path in folder.iterdir()]
    return describe(LocalFiles(), folder, names, "scores", "k", (), {})[0].digest
