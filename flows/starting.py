"""The first lines of a command: what is being started, each with the seconds since the command began."""

from __future__ import annotations

import time
from contextvars import ContextVar

BEGAN: ContextVar[float] = ContextVar("began")
"""When the command began whose work this is (time.monotonic); not set where a flow is called by another program."""


def begin(what: str) -> None:
    """The first line, before anything that takes time is imported."""
    BEGAN.set(time.monotonic())
    print(f"starting: {what}", flush=True)


def began() -> float:
    """When the command began; now, if no command did."""
    return BEGAN.get(time.monotonic())


def timed(text: str, since: float) -> str:
    """A line of the start."""
    return f"{time.monotonic() - since:6.1f} s  {text}"


def tell_step(text: str) -> None:
    """Say what is being started now; nothing where no command began with `begin`."""
    if BEGAN.get(None) is not None:
        print(timed(text, began()), flush=True)
