"""A file that is being downloaded in parts: written wherever they belong, and hashed from the front meanwhile."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from botocore.exceptions import IncompleteReadError

from infra.storage.objects import DownloadRequest, DownloadResult

BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Part:
    """A part of a file; the first has number 1."""

    number: int
    start: int
    size: int


class Incoming:
    """One file on its way; its parts may come in any order, from several threads."""

    def __init__(self, wanted: DownloadRequest, parts: Sequence[Part]) -> None:
        self.wanted = wanted
        self.parts = parts
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._there: set[int] = set()
        self._hashed = 0
        self._hashing = False
        self._digest = hashlib.sha256()
        self._refused: DownloadResult | None = None

    @property
    def refused(self) -> bool:
        """Whether the object is not what was wanted, so that no part of it is needed any more."""
        return self._refused is not None

    def refuse(self, size: int | None) -> None:
        """The object has another size than the wanted one, or there is none."""
        self._refused = DownloadResult(size)

    def fill(self, part: Part, blocks: Iterator[bytes]) -> None:
        """Write a part; IncompleteReadError if it is not as long as it should be."""
        descriptor, count = self._open(), 0
        for block in blocks:
            if count + len(block) > part.size:
                raise IncompleteReadError(actual_bytes=count + len(block), expected_bytes=part.size)
            _write(descriptor, block, part.start + count)
            count += len(block)
        if count != part.size:
            raise IncompleteReadError(actual_bytes=count, expected_bytes=part.size)
        self._follow(part)

    def arrived(self) -> DownloadResult:
        """What came, once all parts are there."""
        return self._refused or DownloadResult(self.wanted.size, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        with self._mutex:
            if self._descriptor is None:
                path = self.wanted.path
                path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            return self._descriptor

    def _follow(self, part: Part) -> None:
        """Hash on as far as the file is there without a gap; one thread at a time does it, the others go on reading."""
        with self._mutex:
            self._there.add(part.number)
            if self._hashing:
                return
            self._hashing = True
        while True:
            with self._mutex:
                if self._hashed + 1 not in self._there:
                    self._hashing = False
                    if self._hashed == len(self.parts):
                        self.close()  # of thousands of files, only those under way are open
                    return
                self._hashed += 1
            self._hash(self.parts[self._hashed - 1])

    def _hash(self, part: Part) -> None:
        descriptor = self._open()
        for start in range(part.start, part.start + part.size, BLOCK_BYTES):
            count = min(BLOCK_BYTES, part.start + part.size - start)
            self._digest.update(os.pread(descriptor, count, start))


def _write(descriptor: int, block: bytes, at: int) -> None:
    rest = memoryview(block)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written
