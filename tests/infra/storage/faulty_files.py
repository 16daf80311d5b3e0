"""A file system for tests: the real one, with a trace of its operations and a fault at the n-th of them.

Syncs are traced but not done: what a dead process wrote stays, so only a power cut would show the difference.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from infra.storage.filesystem import LocalFiles, Status

FAULTS = (
    "EIO once",
    "ENOSPC once",
    "EIO from then on",
    "ENOSPC from then on",
    "short write",
    "dies before",
    "dies half-way",
    "dies after",
)
ALIKE = ("ENOSPC once", "ENOSPC from then on", "dies before")
"""A full disk is much like a broken one, and a death before a call like one after the call before it."""
T = TypeVar("T")


class Died(BaseException):
    """The process is gone: nothing that it still tries has any effect."""


@dataclass(frozen=True)
class Operation:
    """One operation as the trace shows it."""

    name: str
    path: Path
    target: Path | None = None


class FaultyFiles:
    """The real file system with a fault at operation `at` (counted from 1; 0 means never)."""

    def __init__(self, at: int = 0, fault: str = "EIO once", *, other_disk: Path | None = None) -> None:
        self.trace: list[Operation] = []
        self._real = LocalFiles()
        self._at = at
        self._fault = fault
        self._other_disk = other_disk
        self._dead = False

    def arm(self, number: int) -> int:
        """Let operation `number` from now on (counted from 1) be the one that goes wrong; how many there were."""
        self._at = len(self.trace) + number
        return len(self.trace)

    def status(self, path: Path) -> Status | None:
        found = self._do("status", path, lambda: self._real.status(path))
        if found is not None and self._other_disk is not None and path.is_relative_to(self._other_disk):
            return replace(found, device=found.device + 1)
        return found

    def names(self, folder: Path) -> list[str]:
        return self._do("names", folder, lambda: self._real.names(folder))

    def blocks(self, path: Path) -> Iterator[bytes]:
        return iter(self._do("blocks", path, lambda: list(self._real.blocks(path))))

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        content = b"".join(blocks)
        half = [content[: len(content) // 2]]
        self._do("write", path, lambda: self._real.write(path, [content]), lambda: self._real.write(path, half))

    def sync_file(self, path: Path) -> None:
        self._do("sync_file", path, lambda: None)

    def sync_folder(self, folder: Path) -> None:
        self._do("sync_folder", folder, lambda: None)

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", source, lambda: self._real.rename(source, target), target=target)

    def link(self, source: Path, target: Path) -> None:
        self._do("link", source, lambda: self._real.link(source, target), target=target)

    def remove(self, path: Path) -> None:
        self._do("remove", path, lambda: self._real.remove(path))

    def remove_folder(self, folder: Path) -> None:
        self._do("remove_folder", folder, lambda: self._real.remove_folder(folder))

    def make_folder(self, folder: Path) -> None:
        self._do("make_folder", folder, lambda: self._real.make_folder(folder))

    def protect(self, path: Path) -> None:
        self._do("protect", path, lambda: self._real.protect(path))

    def writable(self, folder: Path) -> bool:
        return self._do("writable", folder, lambda: self._real.writable(folder))

    @contextmanager
    def exclusive(self, path: Path) -> Iterator[None]:
        self._do("exclusive", path, lambda: None)
        with self._real.exclusive(path):
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
        if self._dead:
            raise Died
        self.trace.append(Operation(name, path, target))
        count = len(self.trace)
        hit = self._at and (count == self._at or (count > self._at and self._fault.endswith("from then on")))
        if not hit:
            return action()
        if self._fault.startswith("dies"):
            self._dead = True
            if self._fault == "dies after":
                action()
            elif self._fault == "dies half-way" and half is not None:
                half()
            raise Died
        if self._fault == "short write" and half is not None:
            half()
        number = errno.EIO if self._fault.startswith("EIO") else errno.ENOSPC
        raise OSError(number, os.strerror(number), str(path))


class InterruptedFiles(FaultyFiles):
    """The real file system; once it is armed, something else happens right before an operation."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act
        self._interrupted_at = 0

    def arm(self, number: int) -> int:
        """Interrupt before operation `number` from now on (counted from 1; 0 means never); how many there were."""
        self._interrupted_at = len(self.trace) + number
        return len(self.trace)

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
