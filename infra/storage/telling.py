"""Who hears what a store has to say while somebody waits for it: an outage, or a lock that another process holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_LISTENERS: list[Listener] = [_to_stderr]


@contextmanager
def messages_to(listener: Listener) -> Iterator[None]:
    """While open, what there is to say goes there, from any thread, and not to stderr."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def tell(text: str) -> None:
    """Say it to whoever listens."""
    _LISTENERS[-1](text)
