"""What a server of the stack is. A new one is a function that returns one of these, and its name in `plan.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class StackError(RuntimeError):
    """The stack cannot start, or one of its servers did not. The message names the remedy."""


def nothing() -> None:
    """No preparation is needed."""


@dataclass(frozen=True)
class Port:
    """A TCP port that a server listens on, and the setting that changes it."""

    host: str
    number: int
    setting: str


@dataclass(frozen=True)
class Service:
    """One server: its program, what must be there before it, and how to see that it works.

    `prepare` runs before each start of ours, when the servers in `after` are healthy; `furnish` when this one is. Both
    may run many times. `environment` comes on top of the shell's, less what Site.hidden() names. One that ends before
    it is healthy is started `tries` times in all.
    """

    name: str
    address: str
    command: Sequence[str]
    healthy: Callable[[], bool]
    folder: Path
    ports: Sequence[Port] = ()
    after: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] = nothing
    furnish: Callable[[], None] = nothing
    user: str = ""
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 15.0
    start_timeout_s: float = 600.0
    tries: int = 1
