"""Several calls to S3 at a time: each one waits for the network, not for this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
THREADS = 8


def several(function: Callable[[T], R], items: Iterable[T], *, threads: int = THREADS) -> list[R]:
    """What the function makes of each item, in their order; the first error, once all that had begun are through."""
    items = list(items)
    if threads == 1 or len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(function, items))
