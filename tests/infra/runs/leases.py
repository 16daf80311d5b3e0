"""Leases for tests: made-up processes, a clock that only moves when somebody waits, and quick ways to write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infra.process_identity import ProcessIdentity
from infra.runs.lease import Lease, LeaseLost
from infra.runs.lease_expiry import Clock
from infra.runs.local_lease import LocalLease, acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.records import NOTES
from infra.storage.filesystem import FileSystem
from tests.infra.storage.faulty_files import FaultyFiles

T = TypeVar("T")
PIDS = itertools.count(1000)


def somebody(host: str = "here") -> ProcessIdentity:
    """A process that never was."""
    return ProcessIdentity(host=host, boot="b007", namespace="4026531836", pid=next(PIDS), started=7)


def holds(lease: Lease) -> bool:
    """Whether it is the run's lease now."""
    try:
        lease.check()
    except LeaseLost:
        return False
    return True


class StillClock:
    """A clock that stands still but while somebody sleeps, or while a test moves it."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.while_asleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.while_asleep()

    @property
    def clock(self) -> Clock:
        return Clock(
            boot=lambda: self.seconds,
            monotonic=lambda: self.seconds,
            now_ms=lambda: int(self.seconds * 1000),
            sleep=self.sleep,
        )


def successor(root: Path, files: FileSystem | None = None, run: str = "r") -> LocalLease:
    """The lease of a new process that finds every other process dead."""
    return acquire_lease(root, run, files=files or FaultyFiles(), identity=somebody(), alive=lambda _: False)


def writer(root: Path, files: FileSystem | None = None, run: str = "r") -> LocalRecords:
    """A run's records, open for writing by a new process that finds every other process dead."""
    files = files or FaultyFiles()
    return LocalRecords(root, run, files=files, lease=successor(root, files, run))


@dataclass(frozen=True)
class Armed:
    """A run's records, open for writing, with a fault ahead."""

    records: LocalRecords
    lease: LocalLease
    files: FaultyFiles
    start: int

    def operations(self) -> int:
        """How many operations there were since."""
        return len(self.files.trace) - self.start


def armed(root: Path, number: int, fault: str, before: Callable[[LocalLease], None] = lambda lease: None) -> Armed:
    """A new process has the run, and has done `before`; its operation `number` from now on goes wrong."""
    files = FutureFaults(fault)
    lease = successor(root, files)
    before(lease)
    start = len(files.trace)
    files.arm(number)
    return Armed(LocalRecords(root, "r", files=files, lease=lease), lease, files, start)


class FutureFaults(FaultyFiles):
    """The real file system until it is armed."""

    def __init__(self, fault: str) -> None:
        super().__init__(0, fault)

    def arm(self, number: int) -> None:
        """Let operation `number` from now on (counted from 1) be the one that goes wrong."""
        self._at = len(self.trace) + number


def state(root: Path, run: str = "r") -> tuple[object, ...]:
    """All that a reader finds of a run."""
    records = LocalRecords(root, run, files=FaultyFiles())
    return records.read_spec(), records.iterations(), records.all(), *(records.notes(kind) for kind in NOTES)


class InterruptedFiles(FaultyFiles):
    """The real file system; once it is armed, something else happens right before an operation."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act
        self._interrupted_at = 0

    def arm(self, number: int) -> None:
        """Interrupt before operation `number` from now on (counted from 1; 0 means never)."""
        self._interrupted_at = len(self.trace) + number

    def _do(
        self,
        name: str,
        path: Path,
        action: Callable[[], T],
        half: Callable[[], None] | None = None,
        *,
        target: Path | None = None,
    ) -> T:
        if len(self.trace) + 1 == self._interrupted_at:
            self._interrupted_at = 0
            self._act()
        return super()._do(name, path, action, half, target=target)
