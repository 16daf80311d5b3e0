"""What processes that are gone have left in a store on S3, and nothing names.

Whoever writes may be at it still: what could be named yet is left alone until it is a day old, by the server's clock.
What no writer of a store makes is somebody else's: an object whose key ends with a slash (a folder, to some programs),
and files that lie elsewhere than those of artifacts do, or below a kind that has no manifest at all: what is left of
the first upload of a kind is found once another one has come to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from infra.artifacts.manifest import is_key, is_kind
from infra.artifacts.s3_envelope import UPLOAD
from infra.artifacts.s3_files import uploads_below
from infra.gc.orphans import Orphan
from infra.gc.pauses import CLOCK, GC, PAUSE_LASTS, PAUSES, server_time
from infra.runs.checksummed_json import RecordError
from infra.runs.names import is_run_name
from infra.runs.s3_pointer import HEAD, RUNS, RunHead
from infra.storage.objects import Entry, Objects, S3Address
from infra.storage.parallel import parallel_map

UNTOUCHED = timedelta(days=1)
LEASES = "leases"
_LEASE = re.compile(rf"{LEASES}/(\d+)-[^/]+")


class S3Orphans:
    """Looks through one store, at the time at which it is made."""

    def __init__(self, address: S3Address, objects: Objects, *, threads: int = 1) -> None:
        self._address = address
        self._objects = objects
        self._threads = threads
        self._now = server_time(objects, address)

    def found(self) -> list[Orphan]:
        """Everything, by place."""
        runs = [name for name in self._objects.folders(self._address.key(RUNS) + "/") if is_run_name(name)]
        of_runs = parallel_map(self._of_run, runs, threads=self._threads)
        found = [*self._uploads(), *(one for some in of_runs for one in some), *self._of_collectors()]
        return sorted(found, key=lambda orphan: orphan.place)

    def _uploads(self) -> Iterator[Orphan]:
        top = self._address.key("a").removesuffix("a")
        kinds = [name for name in self._objects.folders(top) if is_kind(name)]
        names = [(kind, key) for kind in kinds for key in self._objects.folders(f"{top}{kind}/") if is_key(key)]
        found = parallel_map(
            lambda name: uploads_below(self._objects, self._address, *name), names, threads=self._threads
        )
        # A folder without any manifest may be that of another program, such as MLflow's artifacts.
        ours = {kind for (kind, _), below in zip(names, found, strict=True) if below.has_manifest}
        for (kind, _), below in zip(names, found, strict=True):
            for upload in below.unnamed if kind in ours else ():
                if self._is_old(upload.newest):
                    yield self._orphan(upload.prefix, upload.bytes, "of no artifact, untouched for a day")
        for kind in sorted(ours):
            for pending in self._objects.pending(f"{top}{kind}/"):
                key, _, rest = pending.key.removeprefix(f"{top}{kind}/").partition("/")
                if is_key(key) and UPLOAD.fullmatch(rest.partition("/")[0]) and self._is_old(pending.started):
                    place, why = self._address.uri_of(pending.key), "an upload that was broken off a day ago"
                    yield Orphan(place, 0, why, pending.upload_id)

    def _of_run(self, run: str) -> list[Orphan]:
        head = RunHead(self._objects, self._address, run)
        entries = self._entries(head.key(""))
        try:
            version = head.look()
        except RecordError:
            return []
        named = {head.key(name) for name in (HEAD, *version.head.documents())}
        lease = version.head.lease
        found: list[Orphan] = []
        leases: dict[str, list[Entry]] = {}
        for entry in entries:
            name = entry.key.removeprefix(head.key(""))
            if (of_lease := _LEASE.match(name)) is not None:
                leases.setdefault(of_lease[0], []).append(entry)
            elif entry.key not in named and not name.startswith(f"{LEASES}/") and self._is_old(entry.modified):
                found.append(self._orphan(entry.key, entry.size, "a record that its run does not name, a day old"))
        for folder, inside in leases.items():
            # One with a higher number may be about to begin.
            over = int(folder.removeprefix(f"{LEASES}/").partition("-")[0]) <= lease.number
            if over and (folder != lease.folder or lease.holder is None):
                size = sum(entry.size for entry in inside)
                found.append(self._orphan(head.key(folder) + "/", size, "of a lease that has ended"))
            elif all(self._is_old(entry.modified) for entry in inside) and folder != lease.folder:
                found.append(self._orphan(head.key(folder) + "/", 0, "of a lease that was never given, a day old"))
        return found

    def _of_collectors(self) -> Iterator[Orphan]:
        for kind in (PAUSES, CLOCK):
            for entry in self._entries(self._address.key(GC, kind) + "/"):
                if self._now - entry.modified >= PAUSE_LASTS:
                    yield self._orphan(entry.key, entry.size, "of a process that is gone, an hour old")

    def _entries(self, prefix: str) -> list[Entry]:
        return [entry for entry in self._objects.entries(prefix) if not entry.key.endswith("/")]

    def _is_old(self, modified: datetime) -> bool:
        return self._now - modified >= UNTOUCHED

    def _orphan(self, key: str, size: int, why: str) -> Orphan:
        return Orphan(self._address.uri_of(key), size, why)
