"""Calls to S3 that wait while the server does not answer, and are made again when it does.

A call may be made again whatever became of the one before: what creates or replaces an object carries a nonce, so that
reading it back tells whose it is; everything else comes to the same when it is done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from infra.storage.objects import DownloadRequest, DownloadResult, Entry, Found, Objects, Pending, StoreUnavailable
from infra.storage.outage import Outage, Wait

T = TypeVar("T")


class WaitingObjects:
    """`Objects` that wait for `timeout_s` before StoreUnavailable. `probe` makes one short call, or raises it."""

    def __init__(self, real: Objects, outage: Outage, probe: Callable[[], object], timeout_s: float) -> None:
        self._real = real
        self._outage = outage
        self._probe = probe
        self._timeout_s = timeout_s

    @property
    def bucket(self) -> str:
        return self._real.bucket

    def read(self, key: str) -> Found | None:
        return self.until_answered(lambda: self._real.read(key))

    def create(self, key: str, content: bytes) -> str | None:
        return self.until_answered(lambda: self._real.create(key, content))

    def replace(self, key: str, content: bytes, etag: str) -> str | None:
        return self.until_answered(lambda: self._real.replace(key, content, etag))

    def write(self, key: str, content: bytes) -> None:
        self.until_answered(lambda: self._real.write(key, content))

    def remove(self, keys: Iterable[str]) -> None:
        names = list(keys)
        self.until_answered(lambda: self._real.remove(names))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """A listing that breaks off goes on after the last entry that was given."""
        last: bytes | None = None
        source: Iterator[Entry] | None = None

        def step() -> Entry | None:
            nonlocal source
            if source is None:
                source = (found for found in self._real.entries(prefix) if last is None or found.key.encode() > last)
            try:
                return next(source, None)
            except StoreUnavailable:
                source = None
                raise

        while (entry := self.until_answered(step)) is not None:
            last = entry.key.encode()
            yield entry

    def folders(self, prefix: str) -> list[str]:
        return self.until_answered(lambda: self._real.folders(prefix))

    def copy(self, source: str, target: str) -> bool:
        return self.until_answered(lambda: self._real.copy(source, target))

    def upload(self, files: Mapping[str, Path]) -> None:
        self.until_answered(lambda: self._real.upload(files))

    def download(self, wanted: Iterable[DownloadRequest]) -> dict[str, DownloadResult]:
        files = list(wanted)
        return self.until_answered(lambda: self._real.download(files))

    def pending(self, prefix: str) -> Iterator[Pending]:
        return iter(self.until_answered(lambda: list(self._real.pending(prefix))))

    def abandon(self, pending: Pending) -> None:
        self.until_answered(lambda: self._real.abandon(pending))

    def until_answered(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """What a call gives once the server answers."""
        with Wait(self._outage, self._timeout_s if timeout_s is None else timeout_s) as wait:
            wait.refuse_in_vain()
            while True:
                try:
                    if wait.probing:
                        # Six attempts at each of many files would keep the process from ending meanwhile.
                        self._probe()
                    result = call()
                except StoreUnavailable as error:
                    wait.after(error)
                else:
                    self._outage.note(None)
                    return result
