"""Processes on a simulated disk: they can die at any operation, and be stopped at one while others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.infra.storage.faulty_files import FaultyFiles
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.stepping import Stepping

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


class Process(Stepping, DiskFiles):
    """A process on a simulated disk that others can act beside, between any two of its operations."""

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
