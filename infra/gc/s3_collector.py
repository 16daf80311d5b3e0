"""The collector of a store on S3. There are no locks; two looks and compare-and-swap take their place.

A writer pins an artifact first and reads its manifest then, and makes it live again where it is marked. The
collector marks it first, then reads pauses, pins and records, and removes it only if it is still the version that
was marked. So for every artifact either the writer read the manifest after it was marked, and the removal fails;
or it read it before: then its pin was there before the collector looked at the pins, and if the pin was gone again by
then, the record that names the artifact was there before the collector looked at the records. A pin counts as long as
the head of its run names its lease, and what an ended lease pinned can no longer be named by a record. A pause takes
the place of the pins of whoever holds no lease.

A collector that dies leaves artifacts marked, which for all readers is as good as live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from infra.artifacts.manifest import MANIFEST_NAME, ArtifactError, is_kind
from infra.artifacts.s3_envelope import Version, move, read_version, upload_prefix
from infra.artifacts.s3_files import DAMAGED
from infra.gc.collector import PinsUnreadable
from infra.gc.orphans import Orphan, StoredArtifact
from infra.gc.pauses import in_force
from infra.gc.s3_orphans import S3Orphans
from infra.runs.checksummed_json import RecordError
from infra.runs.names import is_run_name
from infra.runs.s3_lease import PINS
from infra.runs.s3_pointer import RUNS, RunHead
from infra.storage.client import open_objects
from infra.storage.objects import Entry, Objects, S3Address, StoreRefused, StoreUnavailable
from infra.storage.outage import at_once
from infra.storage.parallel import THREADS, parallel_map
from infra.storage.rereading import ChangedOnTheWay

Name = tuple[str, str]


def open_s3_collector(root: str) -> S3Collector:
    """The collector of the store at an s3:// address."""
    address = S3Address.parse(root)
    return S3Collector(address, open_objects(address.bucket), threads=THREADS)


class S3Collector:
    """The collector of a store on S3; see `infra.gc.collector.Collector`. With `threads`, so many calls at a time."""

    def __init__(self, address: S3Address, objects: Objects, *, threads: int = 1) -> None:
        self._address = address
        self._objects = objects
        self._threads = threads
        self._top = address.key("a").removesuffix("a")

    def artifacts(self) -> list[StoredArtifact]:
        """Every artifact in the store that can be removed: not one whose manifest nobody can read."""
        sizes: dict[Name, int] = {}
        for kind in (name for name in self._objects.folders(self._top) if is_kind(name)):
            top = f"{self._top}{kind}/"
            for entry in self._objects.entries(top):
                key, _, name = entry.key.removeprefix(top).partition("/")
                size = 0 if name == MANIFEST_NAME else entry.size
                sizes[kind, key] = sizes.get((kind, key), 0) + size
        versions = parallel_map(self._version, sizes, threads=self._threads)
        return [StoredArtifact(*name, sizes[name]) for name, version in zip(sizes, versions, strict=True) if version]

    def pinned(self) -> set[Name]:
        """Kind and key of what the holders of runs are using. Raises PinsUnreadable."""
        try:
            runs = self._objects.folders(self._address.key(RUNS) + "/")
            found = parallel_map(self._pins, runs, threads=self._threads)
        except (StoreRefused, ChangedOnTheWay) as error:
            raise PinsUnreadable(f"{error}: nobody knows what the holders of runs use meanwhile") from error
        return {name for names in found for name in names}

    def orphans(self, *, quickly: bool = False) -> list[Orphan]:
        """What processes that are gone were writing, or removing; nothing `quickly`, for that takes many calls."""
        return [] if quickly else S3Orphans(self._address, self._objects, threads=self._threads).found()

    def damaged(self) -> list[Orphan]:
        """The damaged artifacts that were set aside."""
        top = self._address.key(DAMAGED) + "/"
        sizes: dict[str, int] = {}
        for entry in self._objects.entries(top):
            name, slash, _ = entry.key.removeprefix(top).partition("/")
            if name and slash:
                sizes[f"{top}{name}/"] = sizes.get(f"{top}{name}/", 0) + entry.size
        places = ((self._address.uri_of(place), size) for place, size in sizes.items())
        return [Orphan(place, size, "damaged, and set aside") for place, size in places]

    def collect(self, wanted: Iterable[Name], needed: Callable[[], set[Name]]) -> list[StoredArtifact]:
        """Remove the wanted artifacts that are neither pinned nor `needed`, and say which these were."""
        names = sorted(set(wanted))
        seen = parallel_map(self._mark, names, threads=self._threads)
        marked = {name: version for name, version in zip(names, seen, strict=True) if version is not None}
        if not marked:
            return []
        if in_force(self._objects, self._address):
            kept = set(marked)
        else:
            # A pin goes once a record names its artifact: so read first the pins, and then the records.
            kept = self.pinned()
            kept |= needed()
        for name in sorted(kept & set(marked)):
            move(self._objects, self._address, *name, marked[name], "live")
        going = [(name, version) for name, version in marked.items() if name not in kept]
        return [
            stored for stored in parallel_map(self._remove_artifact, going, threads=self._threads) if stored is not None
        ]

    def remove(self, orphans: Iterable[Orphan]) -> int:
        """Remove what `orphans` or `damaged` found and would find again; the bytes that are free now."""
        wanted = {(orphan.place, orphan.upload) for orphan in orphans}
        if not wanted:
            return 0
        removed = [found for found in (*self.orphans(), *self.damaged()) if (found.place, found.upload) in wanted]
        for found in removed:
            self._remove_orphan(found)
        return sum(found.bytes for found in removed)

    def _remove_orphan(self, orphan: Orphan) -> None:
        place = orphan.place.removeprefix(self._address.uri_of(""))
        folder = place.endswith("/")
        if folder or orphan.upload is not None:
            for pending in self._objects.pending(place):
                if folder or (pending.key, pending.upload_id) == (place, orphan.upload):
                    self._objects.abandon(pending)
        if folder:
            self._objects.remove([entry.key for entry in self._objects.entries(place)])
        elif orphan.upload is None:
            self._objects.remove([place])

    def _version(self, name: Name) -> Version | None:
        """The version of an artifact that exists and can be read."""
        with suppress(ArtifactError):
            version = read_version(self._objects, self._address, *name)
            return version if version is not None and version.exists else None
        return None

    def _mark(self, name: Name) -> Version | None:
        version = self._version(name)
        if version is None or version.envelope.state == "marked":
            return version
        return move(self._objects, self._address, *name, version, "marked")

    def _remove_artifact(self, going: tuple[Name, Version]) -> StoredArtifact | None:
        name, version = going
        if move(self._objects, self._address, *name, version, "gone") is None:
            return None  # somebody wants it after all
        files: list[Entry] = list(self._objects.entries(upload_prefix(self._address, *name, version.envelope.upload)))
        # What is not removed now belongs to nothing, and is found as an orphan.
        with suppress(StoreUnavailable), at_once():
            self._objects.remove([entry.key for entry in files])
        return StoredArtifact(*name, sum(entry.size for entry in files))

    def _pins(self, run: str) -> set[Name]:
        if not is_run_name(run):
            return set()
        head = RunHead(self._objects, self._address, run)
        try:
            lease = head.look().head.lease
        except RecordError:
            return set()  # whoever asks what the records need keeps all that this run may need
        if lease.holder is None:
            return set()
        top = head.key(f"{lease.folder}/{PINS}/")
        names = [entry.key.removeprefix(top).partition(".") for entry in self._objects.entries(top)]
        return {(kind, key) for kind, _, key in names}
