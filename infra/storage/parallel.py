"""Several calls to S3 at a time: each one waits for the network, not for this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from infra.storage.outage import stop_waiting

T = TypeVar("T")
R = TypeVar("R")
THREADS = 8


def parallel_map(function: Callable[[T], R], items: Iterable[T], *, threads: int = THREADS) -> list[R]:
    """What the function makes of each item, in their order; the first error, once all that had begun are through."""
    items = list(items)
    if threads == 1 or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException as error:
            if not isinstance(error, Exception):
                stop_waiting()  # the process ends, and calls that wait for the server would hold it up
            raise
