"""A bucket in memory, for tests that must know what happens between any two calls, and how often."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from infra.storage.objects import DownloadRequest, DownloadResult, Entry, Found, Objects, Pending
from tests.infra.storage.s3.faulty_objects import FaultyObjects

T = TypeVar("T")


@dataclass
class MemoryObjects:
    """`Objects`, each call at once and whole. `now` is the server's time."""

    bucket: str = "memory"
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    content: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, datetime] = field(default_factory=dict)
    unfinished: list[Pending] = field(default_factory=list)
    mutex: threading.RLock = field(default_factory=threading.RLock)

    def later(self, passed: timedelta) -> None:
        """Let time pass."""
        self.now += passed

    def read(self, key: str) -> Found | None:
        with self.mutex:
            content = self.content.get(key)
            return None if content is None else Found(content, etag_of(content))

    def create(self, key: str, content: bytes) -> str | None:
        with self.mutex:
            return None if key in self.content else self._put(key, content)

    def replace(self, key: str, content: bytes, etag: str) -> str | None:
        with self.mutex:
            found = self.read(key)
            return self._put(key, content) if found is not None and found.etag == etag else None

    def write(self, key: str, content: bytes) -> None:
        with self.mutex:
            self._put(key, content)

    def remove(self, keys: Iterable[str]) -> None:
        with self.mutex:
            for key in keys:
                self.content.pop(key, None)
                self.times.pop(key, None)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self.mutex:
            keys = sorted(key for key in self.content if key.startswith(prefix))
            found = [Entry(k, len(self.content[k]), etag_of(self.content[k]), self.times[k]) for k in keys]
        return iter(found)

    def folders(self, prefix: str) -> list[str]:
        below = [entry.key.removeprefix(prefix) for entry in self.entries(prefix)]
        return sorted({name.partition("/")[0] for name in below if "/" in name} - {""})

    def copy(self, source: str, target: str) -> bool:
        with self.mutex:
            if source not in self.content:
                return False
            self._put(target, self.content[source])
            return True

    def upload(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self.write(key, path.read_bytes())

    def download(self, wanted: Iterable[DownloadRequest]) -> dict[str, DownloadResult]:
        arrived = {}
        for want in wanted:
            found = self.read(want.key)
            if found is None or len(found.content) != want.size:
                arrived[want.key] = DownloadResult(None if found is None else len(found.content))
                continue
            want.path.parent.mkdir(parents=True, exist_ok=True)
            want.path.write_bytes(found.content)
            arrived[want.key] = DownloadResult(want.size, hashlib.sha256(found.content).hexdigest())
        return arrived

    def pending(self, prefix: str) -> Iterator[Pending]:
        return iter([one for one in self.unfinished if one.key.startswith(prefix)])

    def abandon(self, pending: Pending) -> None:
        if pending in self.unfinished:
            self.unfinished.remove(pending)

    def _put(self, key: str, content: bytes) -> str:
        self.content[key], self.times[key] = content, self.now
        return etag_of(content)


class InterruptedObjects(FaultyObjects):
    """A bucket; once it is armed, something else happens right before a call."""

    def __init__(self, real: Objects, act: Callable[[], None]) -> None:
        super().__init__(real)
        self._act = act
        self._interrupted_at = 0

    def arm(self, number: int) -> int:
        """Interrupt before call `number` from now on (counted from 1; 0 means never); how many there were."""
        self._interrupted_at = len(self.trace) + number
        return len(self.trace)

    def _do(self, name: str, key: str, action: Callable[[], T]) -> T:
        if len(self.trace) + 1 == self._interrupted_at:
            self._interrupted_at = 0
            self._act()
        return super()._do(name, key, action)


def etag_of(content: bytes) -> str:
    """As S3 makes it of small objects."""
    return hashlib.md5(content).hexdigest()
