"""What a collector finds in a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact in the store, damaged or not, and the size of its files."""

    kind: str
    key: str
    bytes: int


@dataclass(frozen=True)
class Orphan:
    """What can be removed besides artifacts, and why; `place` is a folder, or an address.

    `upload` is the id of an unfinished upload to that address: only that goes, for another may have been finished.
    """

    place: str
    bytes: int
    why: str
    upload: str | None = None
