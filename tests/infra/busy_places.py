"""Places with artifacts, on which processes work at once: each is stopped between any two calls while others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from infra.artifacts import ArtifactRef
from infra.artifacts.s3_envelope import Envelope, envelope_key, move, read_version, upload_prefix
from infra.process_identity import ProcessIdentity
from infra.runs.lease import Lease
from infra.runs.local_lease import LocalLease
from infra.runs.s3_lease import S3Lease
from infra.storage.objects import Objects
from tests.infra.places import ADDRESS, NOBODY, Bucket, Folder, Place, Seam
from tests.infra.storage import simulated_process
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_process import DiskFiles
from tests.infra.storage.simulated_stores import ROOT, fresh_disk, look, open_on, put
from tests.infra.storage.stepping import Stepping

T = TypeVar("T")
Name = tuple[str, str]


class Process(Protocol):
    """What a process works through that goes on only while `step` lets it; safe to look at in between."""

    trace: list[Any]
    work: str | None

    def begin(self, work: str, action: Callable[[], Any]) -> None:
        """Get ready for some work; nothing of it is done before `step`."""

    def step(self, calls: int) -> bool:
        """Make at most this many calls; whether all is done. Raises what the work raised."""

    def die(self) -> None:
        """End at once."""


class BusyPlace(Place, Protocol):
    """A place with artifacts, and processes that can be stopped."""

    def process(self) -> Process:
        """A new process."""

    def put(self, name: Name, seam: Seam = None, writer: ProcessIdentity = NOBODY) -> None:
        """Make an artifact."""

    def find_or_put(self, name: Name, seam: Seam, writer: ProcessIdentity = NOBODY) -> None:
        """As a task does."""

    def look(self, name: Name) -> bool | None:
        """Whether an artifact is there as it was made; None where there is none."""

    def has_the_run(self, lease: Lease) -> bool:
        """Whether this is the lease of its run now, by what lies there."""


class Disk(Folder):
    """A store on a simulated disk."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        super().__init__(ROOT)
        self.disk = disk or fresh_disk()

    def seam(self, at: int = 0, fault: str = "EIO once") -> DiskFiles:
        return DiskFiles(self.disk, at, fault)

    def process(self) -> simulated_process.Process:
        return simulated_process.Process(self.disk)

    def put(self, name: Name, seam: Seam = None, writer: ProcessIdentity = NOBODY) -> ArtifactRef:
        return put(seam or self.disk, *name, content_of(name), writer)

    def find_or_put(self, name: Name, seam: Seam, writer: ProcessIdentity = NOBODY) -> None:
        store = open_on(seam, writer)
        ref = store.find(*name)
        if ref is None:
            self.put(name, seam, writer)
        else:
            store.fetch(ref)

    def look(self, name: Name) -> bool | None:
        found = look(self.disk, *name)
        return None if found is None else found == content_of(name)

    def has_the_run(self, lease: Lease) -> bool:
        # The lease's own folder does not tell: one that comes too late bears its name for a moment.
        assert isinstance(lease, LocalLease)
        return self.disk.status(lease.partial) is not None


class BusyBucket(Bucket):
    """A store in a bucket in memory."""

    def process(self) -> BucketProcess:
        return BucketProcess(self.objects)

    def put(
        self, name: Name, seam: Seam = None, writer: ProcessIdentity = NOBODY, *, upload: str | None = None
    ) -> None:
        self._put(name, seam or self.objects, upload or uuid4().hex)

    def find_or_put(self, name: Name, seam: Seam, writer: ProcessIdentity = NOBODY) -> None:
        """What is marked is saved, and what is gone is made again."""
        upload = uuid4().hex
        while True:
            version = read_version(seam, ADDRESS, *name)
            if version is None or not version.exists:
                self._put(name, seam, upload)
            elif version.envelope.state == "live" or move(seam, ADDRESS, *name, version, "live") is not None:
                return

    def look(self, name: Name) -> bool | None:
        version = read_version(self.objects, ADDRESS, *name)
        if version is None or not version.exists:
            return None
        found = self.objects.read(upload_prefix(ADDRESS, *name, version.envelope.upload) + "data.bin")
        return found is not None and found.content == content_of(name)["data.bin"]

    def has_the_run(self, lease: Lease) -> bool:
        assert isinstance(lease, S3Lease)
        return self.head(lease.run).look().head.lease == lease._state and not lease.lost

    def _put(self, name: Name, objects: Objects, upload: str) -> None:
        objects.write(upload_prefix(ADDRESS, *name, upload) + "data.bin", content_of(name)["data.bin"])
        version, content = read_version(objects, ADDRESS, *name), Envelope.of("live", upload, {}).to_bytes()
        if version is None:
            objects.create(envelope_key(ADDRESS, *name), content)
        elif not version.exists:
            objects.replace(envelope_key(ADDRESS, *name), content, version.etag)


class BucketProcess(Stepping, FaultyObjects):
    """A process on a bucket that others can act beside, between any two of its calls."""

    def _do(self, name: str, key: str, action: Callable[[], T]) -> T:
        self._wait()
        return super()._do(name, key, action)


def content_of(name: Name) -> dict[str, bytes]:
    """The files of an artifact; the same whoever makes it."""
    return {"data.bin": "/".join(name).encode() * 20, "below/state.json": b"{}"}
