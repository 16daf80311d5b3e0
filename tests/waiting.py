"""How long tests wait for what must happen: beside other work a machine may be ten times slower than alone."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 300.0
FOR_EVER_S = 3600
"""How long a process sleeps that must be ended from outside: none ends by itself while a test still waits."""


def until(happened: Callable[[], bool], what: str = "it") -> None:
    """Return as soon as it has happened."""
    deadline = time.monotonic() + LONG_S
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {LONG_S:g} s"
        time.sleep(0.01)
