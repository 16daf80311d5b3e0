"""How fast the stage under way goes, by its own count, and so how long it takes yet."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 1.0
"""What takes less is not worth a word."""


class Pace:
    """Of one stage after the other: its first count starts the clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._job = ""
        self._first = self._last = (0, 0.0)
        self._total = 0

    def take(self, job: str, done: int, total: int) -> bool:
        """What an engine says of its progress; whether this begins another stage."""
        new = job != self._job
        here = (done, self._clock())
        if new or self._total == 0 or done < self._last[0]:
            self._first = here
        self._job, self._last, self._total = job, here, total
        return new

    def restart(self) -> None:
        """Forget the stage."""
        self._job, self._total = "", 0

    def to_go(self) -> str:
        """Seconds per count, and how long the stage takes yet; nothing as long as that is not known."""
        counted, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        if counted <= 0 or self._total <= self._last[0]:
            return ""
        each = seconds / counted
        rest = each * (self._total - self._last[0]) - (self._clock() - self._last[1])
        return f"{each:.2g} s each, about {span(rest)} of this stage to go" if rest >= LEAST_S else ""


def span(seconds: float) -> str:
    """
    >>> span(42.2), span(90)
    ('42 s', '1.5 min')
    """
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
