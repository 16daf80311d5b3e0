"""Eight writers of one key at once, round after round: does exactly one commit, and do the others take it over?

    python -m benchmarks.s3_races s3://bucket/prefix [--rounds 200] [--writers 8]

Against a real S3 server, for whether conditional puts hold is the server's affair. Credentials and endpoint are
boto3's affair. Prints what it found, and fails at the first round that went wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from infra.artifacts import ArtifactRef
from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.s3_envelope import read_version
from infra.artifacts.s3_store import S3Store
from infra.storage.client import open_objects
from infra.storage.objects import Objects, S3Address

KIND = "scores"


def race(address: S3Address, objects: Objects, work: Path, writers: int) -> str | None:
    """One round: None, or what went wrong."""
    key, start = uuid4().hex, threading.Barrier(writers)

    def write(number: int) -> ArtifactRef:
        # Each on a machine of its own, as far as caches go.
        store = S3Store(address, objects, ArtifactCache(work / str(number), 2**40), libraries={})
        (folder := store.scratch()).joinpath("who").write_text(str(number))
        start.wait()
        ref = store.put(folder, KIND, key)
        store.fetch(ref)
        return ref

    with ThreadPoolExecutor(writers) as pool:
        refs = set(pool.map(write, range(writers)))
    version = read_version(objects, address, KIND, key)
    prefix = address.key(KIND, key) + "/"
    left = [entry.key.removeprefix(prefix) for entry in objects.entries(prefix)]
    shutil.rmtree(work)
    if len(refs) != 1 or version is None:
        return f"{len(refs)} references for {key}"
    if sorted(left) != sorted(["manifest.json", f"{version.envelope.upload}/who"]):
        return f"{left} is left of {key}"
    objects.remove(prefix + name for name in left)
    return None


def main() -> int:
    """All rounds; the exit status says whether each had one winner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", help="s3://bucket/prefix, where the races' objects may lie for a while")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--writers", type=int, default=8)
    options = parser.parse_args()
    address = S3Address.parse(options.root)
    objects = open_objects(address.bucket)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, options.rounds + 1):
            wrong = race(address, objects, Path(folder) / str(number), options.writers)
            if wrong is not None:
                print(f"round {number}: {wrong}", file=sys.stderr)
                return 1
    seconds = time.perf_counter() - started
    print(f"{options.rounds} rounds of {options.writers} writers: one winner in each, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
