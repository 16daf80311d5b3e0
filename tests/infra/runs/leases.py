"""Leases for tests: made-up processes, a clock that only moves when somebody waits, and quick ways to write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from infra.process_identity import ProcessIdentity, this_process
from infra.runs.lease import Lease, LeaseLost
from infra.runs.lease_expiry import Clock
from infra.runs.local_lease import LocalLease, acquire_lease
from infra.runs.local_records import LocalRecords
from infra.storage.filesystem import FileSystem
from tests.infra.storage.faulty_files import FaultyFiles

T = TypeVar("T")
PIDS = itertools.count(1000)
PIDS_OF_LINUX = 2**22


def somebody(host: str = "here") -> ProcessIdentity:
    """A process that never was."""
    return ProcessIdentity(host=host, boot="b007", namespace="4026531836", pid=next(PIDS), started=7)


def dead_here() -> ProcessIdentity:
    """A process of this machine that never was: nobody waits for it."""
    return this_process().model_copy(update={"host": "here", "pid": PIDS_OF_LINUX + next(PIDS)})


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
