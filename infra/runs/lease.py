"""One writer per run: a lease with a heartbeat, and fenced.

A holder that was stopped and goes on after another process has taken the run over can change nothing any more, and
gets LeaseLost. How that is made sure depends on where the run lies: see `local_lease` and `s3_lease`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from infra.runs.checksummed_json import RecordError
from infra.runs.owner import LeaseHeld, LeaseLost, LeaseOwner
from infra.storage.filesystem import StoreReadOnly, StoreUnsupported
from infra.storage.objects import StoreUnavailable

__all__ = [
    "HEARTBEAT_S",
    "Heartbeat",
    "Lease",
    "LeaseHeld",
    "LeaseLost",
    "LeaseOwner",
]

HEARTBEAT_S = 5.0
LAST_BEAT_S = 5.0
"""So long the end of a run waits for a beat that is under way: to a server that hangs it may take minutes."""
PASSING = (OSError, StoreReadOnly, StoreUnavailable, StoreUnsupported, RecordError)


class Lease(Protocol):
    """The right to write a run's records, until it is released or taken over; made by `infra.backend.acquire_lease`.

    `predecessors` are the holders from which this one took the run over because they were dead or silent.
    Safe for several threads.
    """

    run: str
    number: int
    predecessors: tuple[LeaseOwner, ...]

    @property
    def lost(self) -> bool:
        """Whether this process has noticed that the run is no longer its own, or has released it."""

    def check(self) -> None:
        """LeaseLost if the lease is gone."""

    def beat(self) -> None:
        """Show that the holder lives, or LeaseLost."""

    def pin(self, kind: str, key: str) -> None:
        """Keep the collector from an artifact until `unpin_all`, or as long as this lease lasts."""

    def unpin_all(self) -> None:
        """Let go of every pinned artifact."""

    def release(self) -> None:
        """Let the run go; nothing happens where it is gone already."""


class Heartbeat:
    """Beats for a lease in a thread while the context is open; calls `on_lost` once, in that thread, if it is lost."""

    def __init__(self, lease: Lease, on_lost: Callable[[], None], *, every_s: float = HEARTBEAT_S) -> None:
        self._lease = lease
        self._on_lost = on_lost
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{lease.run}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_BEAT_S)

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._lease.beat()
            except LeaseLost:
                if not self._stop.is_set():  # else it is our own release that a slow beat has met
                    self._on_lost()
                return
            except PASSING:
                # A full disk or a server that is away may recover before the lease expires.
                continue
