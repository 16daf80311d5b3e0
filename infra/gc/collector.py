"""Takes out of a store what nobody needs: artifacts that no record names, and what dead processes left behind.

It runs beside writers. A stage pins an artifact before it looks for it in the store, and the pin lives until the record
that names the artifact is durable. What goes is neither named nor pinned, and a stage that comes later does not find it
and makes it again. How the two looks are kept from missing each other depends on where the store is: see
`infra.gc.local_collector` and `infra.gc.s3_collector`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from infra.gc.orphans import Orphan, StoredArtifact

__all__ = ["Collector", "Orphan", "PinsUnreadable", "StoredArtifact"]


class PinsUnreadable(OSError):
    """What the holder of a run uses cannot be read; the message says of which run."""


class Collector(Protocol):
    """The collector of one store. Nothing is removed before `collect` or `remove` is called."""

    def artifacts(self) -> list[StoredArtifact]:
        """Every artifact in the store."""

    def pinned(self) -> set[tuple[str, str]]:
        """Kind and key of what the holders of runs are using. Raises PinsUnreadable."""

    def orphans(self, *, quickly: bool = False) -> list[Orphan]:
        """What processes that are gone were writing, or removing; `quickly`: only where a look costs little.

        On S3 that is nowhere: what is written there is made in the local cache, which removes what is left in it.
        """

    def damaged(self) -> list[Orphan]:
        """The damaged artifacts that were set aside."""

    def collect(
        self, wanted: Iterable[tuple[str, str]], needed: Callable[[], set[tuple[str, str]]]
    ) -> list[StoredArtifact]:
        """Remove the wanted artifacts that are neither pinned nor `needed`, and say which these were.

        `needed` (what the records name) is called when a pin that it does not know of can no longer be missed, and
        must read the records then.
        """

    def remove(self, orphans: Iterable[Orphan]) -> int:
        """Remove what `orphans` or `damaged` found; the bytes that are free now."""
