"""How fast checkpoints go to S3 and back through the store, beside boto3's own upload_file and download_file.

    python -m benchmarks.s3_throughput s3://bucket/prefix [--mib 1024] [--rounds 5]
    python -m benchmarks.s3_throughput --moto

Both sides move the same folder to and from the same server, one after the other and in turn, so that a busy moment hits
both. The store does more: it hashes every file, checks every byte that comes back, and commits. Where credentials and
the endpoint come from is boto3's affair. `--moto` starts the server of the tests; figures then say more of that than
of us.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

import boto3
from botocore.config import Config

from benchmarks.report import versions
from infra.artifacts import ArtifactRef
from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.s3_store import S3Store
from infra.storage.client import open_objects
from infra.storage.objects import Objects, S3Address

RESULTS = Path(__file__).parent / "results" / "s3_throughput.json"
MIB = 2**20
# As in a checkpoint: a few large files, and some small ones.
SHARES = {"policy/model.safetensors": 0.25, "critic/model.safetensors": 0.25, "optimizer/moments.safetensors": 0.5}
SMALL_FILES, SMALL_BYTES = 200, 64 * 1024
RAW_THREADS = 10


@dataclass
class Row:
    """The seconds of one thing and the growth of the process, each round, of the store and of plain boto3."""

    what: str
    ours_s: list[float] = field(default_factory=list)
    raw_s: list[float] = field(default_factory=list)
    ours_mib: list[float] = field(default_factory=list)
    raw_mib: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times as long the store takes, by medians."""
        return statistics.median(self.ours_s) / statistics.median(self.raw_s)

    @property
    def extra_s(self) -> float:
        """How many seconds longer the store takes, by medians."""
        return statistics.median(self.ours_s) - statistics.median(self.raw_s)


class Raw:
    """Plain boto3, which checks nothing either: the files of a folder, one after the other, or several at once."""

    def __init__(self, address: S3Address) -> None:
        checks = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        self._s3 = boto3.client("s3", config=Config(**checks))
        self._address = address

    def up(self, folder: Path, name: str, threads: int) -> None:
        """Upload a folder."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda path: self._up(path, f"{name}/{path.relative_to(folder)}"), paths))

    def down(self, names: list[str], name: str, folder: Path, threads: int) -> None:
        """Download these files."""
        for below in names:
            (folder / below).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda below: self._down(f"{name}/{below}", folder / below), names))

    def _up(self, path: Path, key: str) -> None:
        self._s3.upload_file(str(path), self._address.bucket, self._address.key(key))

    def _down(self, key: str, path: Path) -> None:
        self._s3.download_file(self._address.bucket, self._address.key(key), str(path))


def large(size: int) -> dict[str, int]:
    """The files of a checkpoint of this many bytes."""
    return {name: int(size * share) for name, share in SHARES.items()} | {"state.json": 1000}


def small() -> dict[str, int]:
    """Many small files."""
    return {f"{number:03}.json": SMALL_BYTES for number in range(SMALL_FILES)}


def fill(folder: Path, files: dict[str, int]) -> None:
    """Make files of random bytes."""
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "wb") as file:
            for start in range(0, size, MIB):
                file.write(os.urandom(min(MIB, size - start)))


@dataclass
class Watch:
    """The seconds that something takes, and how far the process grows meanwhile."""

    seconds: float = 0.0
    growth_mib: float = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what happens inside."""
        done = threading.Event()
        before = resident_mib()

        def look() -> None:
            while not done.wait(0.02):
                self.growth_mib = max(self.growth_mib, resident_mib() - before)

        looking = threading.Thread(target=look)
        looking.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - started
            done.set()
            looking.join()


def resident_mib() -> float:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


class Round:
    """One folder, up and down by both ways."""

    def __init__(self, address: S3Address, objects: Objects, raw: Raw, work: Path, files: dict[str, int]) -> None:
        self._address, self._objects, self._raw, self._work, self._files = address, objects, raw, work, files
        self._key = uuid4().hex
        self._ref: ArtifactRef | None = None
        fill(work / "folder", files)
        shutil.copytree(work / "folder", work / "same")

    def ours(self, up: bool) -> None:
        """By the store: from one machine, to another."""
        cache = ArtifactCache(self._work / ("here" if up else "there"), 2**50)
        store = S3Store(self._address, self._objects, cache)
        if up:
            self._ref = store.put(self._work / "folder", "bench", self._key)
        elif self._ref is not None:
            store.fetch(self._ref)

    def plain(self, up: bool, threads: int) -> None:
        """By boto3."""
        if up:
            self._raw.up(self._work / "same", f"raw/{self._key}", threads)
        else:
            self._raw.down(list(self._files), f"raw/{self._key}", self._work / "raw", threads)

    def clear(self) -> None:
        """Remove everything."""
        for folder in self._work.iterdir():
            shutil.rmtree(folder)
        for top in ("bench", "raw"):
            prefix = self._address.key(top) + "/"
            self._objects.remove([entry.key for entry in self._objects.entries(prefix)])


def measure(address: S3Address, work: Path, what: str, files: dict[str, int], rounds: int, threads: int) -> list[Row]:
    """Both ways, in turn: who goes first changes from round to round."""
    rows = {True: Row(f"{what} up"), False: Row(f"{what} down")}
    objects, raw = open_objects(address.bucket), Raw(address)
    for number in range(rounds):
        this = Round(address, objects, raw, work, files)
        for up, row in rows.items():
            for ours in (True, False) if number % 2 else (False, True):
                watch = Watch()
                with watch.watching():
                    this.ours(up) if ours else this.plain(up, threads)
                (row.ours_s if ours else row.raw_s).append(round(watch.seconds, 3))
                (row.ours_mib if ours else row.raw_mib).append(round(watch.growth_mib, 1))
        this.clear()
        print(f"round {number + 1} of {rounds}, {what}", file=sys.stderr, flush=True)
    return list(rows.values())


@contextmanager
def moto_server() -> Iterator[str]:
    """The server of the tests, and a bucket in it."""
    from tests.infra.storage.s3.s3_server import S3Server

    server = S3Server()
    os.environ.update(server.environment())
    try:
        yield f"s3://{server.make_bucket()}/bench"
    finally:
        server.stop()


def run(root: str, mib: int, rounds: int) -> dict[str, object]:
    """All measurements."""
    address = S3Address.parse(root)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(address, Path(folder), f"{mib} MiB", large(mib * MIB), rounds, 1)
        rows += measure(address, Path(folder), f"{SMALL_FILES} x 64 KiB", small(), rounds, RAW_THREADS)
    print(f"{'':22}{'ours':>9}{'boto3':>9}{'ratio':>8}{'extra':>9}{'memory':>10}{'boto3':>10}")
    for row in rows:
        ours, plain = statistics.median(row.ours_s), statistics.median(row.raw_s)
        memory = f"{max(row.ours_mib):+7.0f}MiB{max(row.raw_mib):+7.0f}MiB"
        print(f"{row.what:22}{ours:8.2f}s{plain:8.2f}s{row.ratio:8.2f}{row.extra_s:+8.2f}s{memory}")
    table = [{**asdict(row), "ratio": round(row.ratio, 3), "extra_s": round(row.extra_s, 3)} for row in rows]
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "rows": table}


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", help="s3://bucket/prefix, where the benchmark's objects may lie for a while")
    parser.add_argument("--moto", action="store_true", help="start the server of the tests instead")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", default="S3", help="what the results call the server")
    options = parser.parse_args()
    if bool(options.root) == options.moto:
        parser.error("give an s3:// address or --moto")
    if options.moto:
        with moto_server() as root:
            found = run(root, options.mib, options.rounds)
    else:
        found = run(options.root, options.mib, options.rounds)
    server = "moto" if options.moto else options.server
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"server": server, "versions": versions(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
