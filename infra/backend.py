"""The one place that decides from the address of a store what serves it: a folder, or S3.

To add another kind of store, give every function here one more answer. What an address does not need is not imported:
boto3 is worth a quarter of a second, and most stores are folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from infra.process_identity import ProcessIdentity, is_alive
from infra.runs.lease_expiry import EXPIRY_S, Clock
from infra.settings import Settings
from infra.storage.filesystem import local_root
from infra.storage.objects import SCHEME

if TYPE_CHECKING:
    from infra.artifacts.store import ArtifactStore
    from infra.gc.collector import Collector
    from infra.runs.lease import Lease
    from infra.runs.lease_expiry import RunLeases
    from infra.runs.records import RunRecords, Runs
    from infra.storage.write_once import WriteOnceLog


def is_remote(root: str | Path) -> bool:
    """Whether the store lies on S3, so that what a process uses of it is copied to its own disk first."""
    return isinstance(root, str) and root.startswith(f"{SCHEME}://")


def open_store(root: str | Path, *, cache: Path | None = None) -> ArtifactStore:
    """Open the store at a folder, a file:// uri or s3://bucket/prefix; a folder is created by the first write.

    `cache` is the folder for local copies of remote artifacts, by default that of the settings; a local store makes no
    copies and needs none. StoreUnsupported says what is wrong with an address, a bucket or its credentials.
    """
    if is_remote(root):
        from infra.artifacts.download_cache import ArtifactCache
        from infra.artifacts.s3_store import open_s3_store

        settings = Settings()
        limit = int(settings.cache_gib * 2**30)
        return open_s3_store(str(root), ArtifactCache(cache or settings.cache_folder, limit))
    from infra.artifacts.local_store import LocalStore

    return LocalStore(local_root(root))


def open_runs(root: str | Path) -> Runs:
    """The runs of the store at `root`."""
    if is_remote(root):
        from infra.runs.s3_runs import open_s3_runs

        return open_s3_runs(str(root))
    from infra.runs.local_runs import LocalRuns

    return LocalRuns(root)


def open_records(root: str | Path, run: str, *, lease: Lease | None = None) -> RunRecords:
    """The records of a run in the store at `root`; without its `lease` they can be read only."""
    if is_remote(root) and lease is not None:
        from infra.runs.s3_runs import records_of

        return records_of(str(root), run, lease)
    return open_runs(root).records(run, lease=lease)


def open_leases(root: str | Path, run: str) -> RunLeases:
    """The leases of a run, for whoever only looks; see `infra.runs.holder`."""
    if is_remote(root):
        from infra.runs.s3_lease import open_lease_states

        return open_lease_states(str(root), run)
    from infra.runs.local_lease_folders import open_lease_folders

    return open_lease_folders(root, run)


def acquire_lease(
    root: str | Path,
    run: str,
    *,
    note: Mapping[str, str] | None = None,
    wait: bool = False,
    identity: ProcessIdentity | None = None,
    alive: Callable[[ProcessIdentity], bool | None] = is_alive,
    clock: Clock | None = None,
    expiry_s: float = EXPIRY_S,
) -> Lease:
    """Become the only writer of a run, durable when this returns. Read the run's records after it, not before.

    A holder whose process is gone is taken over at once, a silent one after `expiry_s`. LeaseHeld if another process
    has the run; with `wait`, this waits for it instead, for as long as it takes. `note` is for the successor's eyes.
    """
    if is_remote(root):
        from infra.runs import s3_lease

        return s3_lease.acquire_lease(
            str(root), run, note=note, wait=wait, identity=identity, alive=alive, clock=clock, expiry_s=expiry_s
        )
    from infra.runs import local_lease

    return local_lease.acquire_lease(
        root, run, note=note, wait=wait, identity=identity, alive=alive, clock=clock, expiry_s=expiry_s
    )


def open_collector(root: str | Path) -> Collector:
    """The collector of the store at `root`."""
    if is_remote(root):
        from infra.gc.s3_collector import open_s3_collector

        return open_s3_collector(str(root))
    from infra.gc.local_collector import LocalCollector

    return LocalCollector(root)


def collecting_paused(root: str | Path) -> AbstractContextManager[None]:
    """While open, no collector of the store removes an artifact."""
    if is_remote(root):
        from infra.gc import pauses

        return pauses.collecting_paused(str(root))
    from infra.gc import local_collector

    return local_collector.collecting_paused(root)


def open_log(root: str | Path, *folders: str) -> WriteOnceLog:
    """The documents in a folder of the store at `root` that are written once."""
    if is_remote(root):
        from infra.storage.write_once_objects import open_s3_pages

        return open_s3_pages(str(root), *folders)
    from infra.storage.write_once_files import LocalPages

    return LocalPages(root, *folders)
