"""A store for the contract suites, in a folder or in a bucket in memory: one face, behind which each is as it is.

A process works on a place through a seam of its own, at which its n-th call goes wrong or is interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from infra.artifacts.manifest import sha256_of
from infra.gc.collector import Collector
from infra.gc.local_collector import LocalCollector
from infra.gc.s3_collector import S3Collector
from infra.runs import local_lease, s3_lease
from infra.runs.lease import Lease
from infra.runs.lease_expiry import RunLeases
from infra.runs.local_lease_folders import LeaseFolders
from infra.runs.local_runs import LocalRuns
from infra.runs.names import NOTES
from infra.runs.records import RunRecords, Runs
from infra.runs.s3_pointer import RunHead
from infra.runs.s3_runs import S3Runs
from infra.storage.objects import S3Address, StoreUnavailable
from infra.storage.write_once import WriteOnceLog
from infra.storage.write_once_files import LocalPages
from infra.storage.write_once_objects import S3Pages
from tests.infra.runs.leases import somebody
from tests.infra.storage import faulty_files
from tests.infra.storage.faulty_files import Died, FaultyFiles, InterruptedFiles
from tests.infra.storage.s3 import faulty_objects
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.memory_objects import InterruptedObjects, MemoryObjects

Seam = Any
NOBODY = somebody()
ADDRESS = S3Address.parse("s3://memory/store")
NO_NOTES: list[list[object]] = [[] for _ in NOTES]
"""What a run without notes has of each kind."""


@dataclass(frozen=True)
class Document:
    """Something that lies in a store, as whoever damages it sees it; `name` is how complaints name it."""

    name: str
    read: Callable[[], bytes]
    write: Callable[[bytes | None], None]


class Place(Protocol):
    """A store, empty at first. Calls that fail raise one of `errors`; after a fault of `passing` all is well again.

    `one_step`: a change of a run is one call, the last of those that it takes. `acquires_in`: acquiring a run takes at
    least so many.
    """

    address: str
    faults: tuple[str, ...]
    passing: tuple[str, ...]
    errors: tuple[type[BaseException], ...]
    one_step: bool
    acquires_in: int

    def seam(self, at: int = 0, fault: str = "") -> Seam:
        """What a process works through; its call number `at` goes wrong."""

    def interrupted(self, act: Callable[[], None]) -> Seam:
        """What a process works through; once it is armed, `act` is done right before a call."""

    def acquire(self, run: str = "r", *, seam: Seam = None, **how: Any) -> Lease:
        """What `acquire_lease` does."""

    def runs(self, seam: Seam = None) -> Runs:
        """The runs."""

    def leases(self, run: str = "r") -> RunLeases:
        """The leases of a run, for whoever only looks."""

    def collector(self, seam: Seam = None, **who: Any) -> Collector:
        """A collector, which finds every process dead; `identity` and `alive` say otherwise."""

    def log(self, *folders: str) -> WriteOnceLog:
        """Documents that are written once."""

    def document(self, name: str) -> Document:
        """A document of run r: `spec`, `iterations/1`, `rollbacks/2` or `heartbeat`."""

    def index(self) -> list[Document]:
        """What names all documents of run r, where there is such a thing."""

    def content(self, where: str) -> bytes:
        """What lies where people are told that something is."""

    def in_force(self) -> list[int]:
        """The leases of run r that are not ended, by what lies there."""

    def superseded(self) -> list[int]:
        """The iterations whose records were taken out of run r and are kept."""

    def litter(self) -> list[str]:
        """What lies among the runs and belongs to none, or to a lease that was never given."""

    def clear_up(self) -> None:
        """What a collector does days later."""


class Acts:
    """What tests do at any place."""

    def records(self: Any, run: str = "r", *, lease: Lease | None = None, seam: Seam = None) -> RunRecords:
        """The records of a run."""
        records: RunRecords = self.runs(seam).records(run, lease=lease)
        return records

    def successor(self: Any, seam: Seam = None, run: str = "r") -> Lease:
        """The lease of a new process that finds every other process dead."""
        lease: Lease = self.acquire(run, seam=seam, identity=somebody(), alive=lambda _: False)
        return lease

    def writer(self: Any, seam: Seam = None, run: str = "r") -> RunRecords:
        """A run's records, open for writing by such a process."""
        seam = seam or self.seam()
        records: RunRecords = self.records(run, lease=self.successor(seam, run), seam=seam)
        return records

    def state(self: Any, run: str = "r") -> tuple[object, ...]:
        """All that a reader finds of a run. What names its last record names one that is there."""
        records = self.records(run)
        if (last := records.contents().last) is not None:
            (named,) = records.marked([last])
            assert named["digest"] == sha256_of(records.read(named["iteration"]))
        return records.read_spec(), records.iterations(), records.all(), *(records.notes(kind) for kind in NOTES)


class Folder(Acts):
    """A store in a folder of the real disk."""

    faults = faulty_files.FAULTS
    passing = tuple(fault for fault in faults if fault.endswith("once") or fault == "short write")
    errors = (OSError, Died)
    one_step = False
    acquires_in = 20

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)
        self._run = root / "runs/r"

    def seam(self, at: int = 0, fault: str = "EIO once") -> FaultyFiles:
        return FaultyFiles(at, fault)

    def interrupted(self, act: Callable[[], None]) -> InterruptedFiles:
        return InterruptedFiles(act)

    def acquire(self, run: str = "r", *, seam: Seam = None, **how: Any) -> local_lease.LocalLease:
        return local_lease.acquire_lease(self.root, run, files=seam or self.seam(), **how)

    def runs(self, seam: Seam = None) -> LocalRuns:
        return LocalRuns(self.root, files=seam or self.seam())

    def leases(self, run: str = "r") -> LeaseFolders:
        return LeaseFolders(self.root, run, NOBODY, self.seam())

    def collector(self, seam: Seam = None, **who: Any) -> LocalCollector:
        return LocalCollector(
            self.root, files=seam or self.seam(), **{"identity": NOBODY, "alive": lambda _: False, **who}
        )

    def log(self, *folders: str) -> LocalPages:
        return LocalPages(self.root, *folders)

    def document(self, name: str) -> Document:
        if name == "heartbeat":
            path = self._run / f"leases/{self.in_force()[-1]:06d}/heartbeat"
        else:
            kind, _, number = name.partition("/")
            path = self._run / (f"{kind}/{int(number):06d}.json" if number else f"{kind}.json")

        def write(content: bytes | None) -> None:
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)

        return Document(path.name, path.read_bytes, write)

    def index(self) -> list[Document]:
        return []

    def content(self, where: str) -> bytes:
        return Path(where).read_bytes()

    def in_force(self) -> list[int]:
        names = [path.name for path in (self._run / "leases").iterdir()]
        return sorted(int(name) for name in names if name.isdigit())

    def superseded(self) -> list[int]:
        return sorted(int(path.name[:6]) for path in self._run.glob("leases/*/superseded/0*.json"))

    def litter(self) -> list[str]:
        leases = [path.name for path in self._run.glob("leases/*")]
        wrong = [name for name in leases if not re.fullmatch(r"\d{6}(\.ended)?", name)]
        # Whoever acquires the run closes the leases that have ended.
        writable = [str(path) for path in self._run.glob("leases/*.ended/partial") if self.in_force()]
        return [*wrong, *writable, *(path.name for path in self.root.glob("runs/.new*"))]

    def clear_up(self) -> None:
        collector = self.collector()
        collector.remove(collector.orphans())
        assert collector.orphans() == []


@dataclass
class Bucket(Acts):
    """A store on S3, in a bucket in memory."""

    objects: MemoryObjects = field(default_factory=MemoryObjects)
    address = ADDRESS.uri
    faults = faulty_objects.FAULTS
    passing = ("fails before", "fails after")
    errors = (StoreUnavailable, Died)
    one_step = True
    acquires_in = 3

    def seam(self, at: int = 0, fault: str = "fails before") -> FaultyObjects:
        return FaultyObjects(self.objects, at, fault)

    def interrupted(self, act: Callable[[], None]) -> InterruptedObjects:
        return InterruptedObjects(self.objects, act)

    def acquire(self, run: str = "r", *, seam: Seam = None, **how: Any) -> s3_lease.S3Lease:
        return s3_lease.acquire_lease(self.address, run, objects=seam or self.objects, **how)

    def runs(self, seam: Seam = None) -> S3Runs:
        return S3Runs(ADDRESS, seam or self.objects)

    def head(self, run: str = "r") -> RunHead:
        """The head of a run."""
        return RunHead(self.objects, ADDRESS, run)

    def leases(self, run: str = "r") -> s3_lease.LeaseStates:
        return s3_lease.LeaseStates(self.head(run))

    def collector(self, seam: Seam = None, **who: Any) -> S3Collector:
        return S3Collector(ADDRESS, seam or self.objects)

    def log(self, *folders: str) -> S3Pages:
        return S3Pages(self.objects, ADDRESS.key(*folders) + "/")

    def document(self, name: str) -> Document:
        head, kind = self.head().look().head, name.partition("/")[0]
        named: Mapping[str, str] = {
            "spec": head.spec or "",
            "heartbeat": f"{head.lease.folder}/heartbeat.json",
            **{f"iterations/{iteration}": document for iteration, document in head.iterations.items()},
            **{f"{kind}/{n}": document for n, document in enumerate(head.notes.get(kind, ()), 1)},
        }
        return self._object(named[name])

    def index(self) -> list[Document]:
        return [self._object("head.json")]

    def content(self, where: str) -> bytes:
        return self.objects.content[where.removeprefix("s3://memory/")]

    def in_force(self) -> list[int]:
        lease = self.head().look().head.lease
        return [] if lease.holder is None else [lease.number]

    def superseded(self) -> list[int]:
        names = [name for name in self.head().look().head.superseded if self._key(name) in self.objects.content]
        return sorted(int(name.split("/")[1][:6]) for name in names if name.startswith("iterations/"))

    def litter(self) -> list[str]:
        head = self.head().look().head
        runs = [key for key in self.objects.content if key.startswith(self._key(""))]
        named = {self._key(name) for name in ("head.json", *head.documents())} if runs else set()
        held = self._key(head.lease.folder + "/") if head.lease.holder is not None else None
        return [key for key in runs if key not in named and (held is None or not key.startswith(held))]

    def clear_up(self) -> None:
        self.objects.later(timedelta(days=2))
        collector = self.collector()
        collector.remove(collector.orphans())
        assert collector.orphans() == []

    def _object(self, name: str) -> Document:
        key = self._key(name)

        def write(content: bytes | None) -> None:
            self.objects.remove([key]) if content is None else self.objects.write(key, content)

        return Document(name, lambda: self.objects.content[key], write)

    def _key(self, name: str) -> str:
        return f"{ADDRESS.key('runs', 'r')}/{name}"
