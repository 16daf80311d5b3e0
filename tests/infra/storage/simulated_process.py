"""Processes on a simulated disk: they can die at any operation, and be stopped at one while others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.infra.storage.faulty_files import Died, FaultyFiles
from tests.infra.storage.simulated_disk import SimulatedDisk

T = TypeVar("T")


class DiskFiles(FaultyFiles):
    """A process's view of a simulated disk, with a trace and with a fault at operation `at`; syncs are done."""

    def __init__(self, disk: SimulatedDisk, at: int = 0, fault: str = "dies before") -> None:
        super().__init__(at, fault)
        self._real = disk

    def sync_file(self, path: Path) -> None:
        self._do("sync_file", path, lambda: self._real.sync_file(path))

    def sync_folder(self, folder: Path) -> None:
        self._do("sync_folder", folder, lambda: self._real.sync_folder(folder))


class Process(DiskFiles):
    """A process whose work goes on only while `step` lets it, so that others can act between any two operations.

    It works in a thread of its own, but never at the same time as the one that calls `step`. What is called outside
    `begin` is done at once.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__(disk)
        self.work: str | None = None
        self._left = 0
        self._turn = threading.Semaphore(0)
        self._handed_back = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, work: str, action: Callable[[], Any]) -> None:
        """Get ready for some work; nothing of it is done before `step`."""
        assert self.work is None
        self.work = work
        self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._thread.start()

    def step(self, operations: int) -> bool:
        """Do at most this many operations (fewer where a lock is held by another process); whether the work is done."""
        assert self.work is not None
        self._left = operations
        self._turn.release()
        self._handed_back.acquire()
        if self.work is None and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self.work is None

    def die(self) -> None:
        """End at once, as by SIGKILL: what was written stays, locks are free."""
        self._dead = True
        if self.work is not None:
            try:
                self.step(1)
            except Died:
                return

    @contextmanager
    def exclusive(self, path: Path) -> Iterator[None]:
        self._wait()
        while path in self._real.locked and self.work is not None and not self._dead:
            self._left = 0
            self._wait()
        with super().exclusive(path):
            yield

    def _do(
        self,
        name: str,
        path: Path,
        action: Callable[[], T],
        half: Callable[[], None] | None = None,
        *,
        target: Path | None = None,
    ) -> T:
        if name != "exclusive":
            self._wait()
        return super()._do(name, path, action, half, target=target)

    def _wait(self) -> None:
        if self.work is None or self._dead:
            return
        if self._left <= 0:
            self._handed_back.release()
            self._turn.acquire()
        self._left -= 1

    def _run(self, action: Callable[[], Any]) -> None:
        self._turn.acquire()
        try:
            action()
        except BaseException as error:
            self._failure = error
        self.work = None
        self._handed_back.release()
