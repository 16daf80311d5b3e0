"""Calls to S3 for tests: the real ones, with a trace of them and a fault at the n-th.

Several files of one upload or download count as one call each, so that a fault can hit in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from infra.storage.objects import DownloadRequest, DownloadResult, Entry, Found, Objects, Pending, StoreUnavailable
from tests.infra.storage.faulty_files import Died

FAULTS = ("fails before", "fails after", "fails from then on", "dies before", "dies after")
T = TypeVar("T")


class FaultyObjects:
    """A bucket with a fault at call `at` (counted from 1; 0 means never).

    After a call that "fails after", S3 has done what was asked and only the answer was lost. `before` is told the
    number of each call, and no other one begins meanwhile.
    """

    def __init__(
        self, real: Objects, at: int = 0, fault: str = "fails before", before: Callable[[int], None] | None = None
    ) -> None:
        self.trace: list[str] = []
        self._real = real
        self._at = at
        self._fault = fault
        self._before = before
        self._dead = False
        self._mutex = threading.Lock()

    def arm(self, number: int) -> int:
        """Let call `number` from now on (counted from 1) be the one that goes wrong; how many there were."""
        self._at = len(self.trace) + number
        return len(self.trace)

    @property
    def bucket(self) -> str:
        return self._real.bucket

    def read(self, key: str) -> Found | None:
        return self._do("read", key, lambda: self._real.read(key))

    def create(self, key: str, content: bytes) -> str | None:
        return self._do("create", key, lambda: self._real.create(key, content))

    def replace(self, key: str, content: bytes, etag: str) -> str | None:
        return self._do("replace", key, lambda: self._real.replace(key, content, etag))

    def write(self, key: str, content: bytes) -> None:
        self._do("write", key, lambda: self._real.write(key, content))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._do("remove", key, lambda key=key: self._real.remove([key]))

    def entries(self, prefix: str) -> Iterator[Entry]:
        return iter(self._do("entries", prefix, lambda: list(self._real.entries(prefix))))

    def folders(self, prefix: str) -> list[str]:
        return self._do("folders", prefix, lambda: self._real.folders(prefix))

    def copy(self, source: str, target: str) -> bool:
        return self._do("copy", source, lambda: self._real.copy(source, target))

    def upload(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._do("upload", key, lambda key=key, path=path: self._real.upload({key: path}))

    def download(self, wanted: Iterable[DownloadRequest]) -> dict[str, DownloadResult]:
        arrived: dict[str, DownloadResult] = {}
        for want in wanted:
            arrived |= self._do("download", want.key, lambda want=want: self._real.download([want]))
        return arrived

    def pending(self, prefix: str) -> Iterator[Pending]:
        return iter(self._do("pending", prefix, lambda: list(self._real.pending(prefix))))

    def abandon(self, pending: Pending) -> None:
        self._do("abandon", pending.key, lambda: self._real.abandon(pending))

    def _do(self, name: str, key: str, action: Callable[[], T]) -> T:
        with self._mutex:
            if self._dead:
                raise Died
            self.trace.append(f"{name} {key}")
            count = len(self.trace)
            if self._before is not None:
                self._before(count)
        hit = self._at and (count == self._at or (count > self._at and self._fault.endswith("from then on")))
        if not hit:
            return action()
        if self._fault.endswith("after"):
            action()
        if self._fault.startswith("dies"):
            self._dead = True
            raise Died
        raise StoreUnavailable(f"S3 does not answer call {count}: {name} {key}")
