"""`gc/pauses/…`: while one of these lies there, no collector removes an artifact. And the server's own time.

The clocks of two machines are never compared: the age of a pause is the difference between the
server's times of it and of an object that was written just now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from uuid import uuid4

from infra.storage.client import open_objects
from infra.storage.objects import Entry, Objects, S3Address, StoreUnavailable
from infra.storage.outage import at_once

GC = "gc"
PAUSES = "pauses"
CLOCK = "clock"
PAUSE_LASTS = timedelta(hours=1)


@contextmanager
def collecting_paused(root: str, *, objects: Objects | None = None) -> Iterator[None]:
    """While open, and for an hour at most, no collector of the store removes an artifact."""
    address = S3Address.parse(root)
    seam = objects or open_objects(address.bucket)
    key = address.key(GC, PAUSES, f"{uuid4().hex}.json")
    seam.write(key, b"{}")
    try:
        yield
    finally:
        # One that stays is out of force in an hour, and then removed by a collector.
        with suppress(StoreUnavailable), at_once():
            seam.remove([key])


def pauses(objects: Objects, address: S3Address) -> list[Entry]:
    """Every pause, in force or not."""
    return list(objects.entries(address.key(GC, PAUSES) + "/"))


def in_force(objects: Objects, address: S3Address) -> bool:
    """Whether collecting is paused."""
    found = pauses(objects, address)
    if not found:
        return False
    now = server_time(objects, address)
    return any(now - pause.modified < PAUSE_LASTS for pause in found)


def server_time(objects: Objects, address: S3Address) -> datetime:
    """What time it is where the objects are."""
    key = address.key(GC, CLOCK, f"{uuid4().hex}.json")
    objects.write(key, b"{}")
    try:
        return next(entry.modified for entry in objects.entries(key))
    finally:
        with suppress(StoreUnavailable), at_once():
            objects.remove([key])
