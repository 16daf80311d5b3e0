"""What a process knows of an S3 server that does not answer: for how long its calls wait, and who hears of it.

Calls wait for a server that has answered before, because what is under way is worth it. They do not wait for long
where nothing has begun yet, and not at all where the work is ending anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from infra.storage.objects import StoreUnavailable
from infra.storage.telling import tell

START_S = 15.0
"""So long a server is waited for that has never answered: its address may be wrong."""
PAUSE_S = 2.0
SAY_EVERY_S = 60.0
FRESH_S = 10.0
"""So long what was seen of a server is taken for true where nobody waits any more."""


class Outage:
    """What is known of one server. Safe for several threads."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.answered = False
        self.last_error: StoreUnavailable | None = None
        self._lock = threading.Lock()
        self._waiting = 0
        self._began = self._said = self._failed = 0.0
        self._hurry = threading.Event()

    @property
    def hurrying(self) -> bool:
        """Whether nobody waits any more."""
        return self._hurry.is_set()

    @property
    def fresh(self) -> bool:
        """Whether it has just failed to answer."""
        return self.last_error is not None and time.monotonic() - self._failed < FRESH_S

    def open(self) -> None:
        """Somebody begins to work with the server."""
        self._hurry.clear()

    def hurry(self) -> None:
        """End every wait; from now on, and until somebody begins anew, no call waits."""
        self._hurry.set()

    def note(self, error: StoreUnavailable | None) -> None:
        """It has failed to answer, or answered."""
        with self._lock:
            self.last_error, self._failed = error, time.monotonic()
            self.answered = self.answered or error is None

    def begin(self, timeout_s: float) -> None:
        """One more call waits."""
        with self._lock:
            self._waiting += 1
            first = self._waiting == 1
            if first:
                self._began = self._said = time.monotonic()
        if first:
            tell(f"{self.server} does not answer: waiting for it for up to {spelled(timeout_s)}")

    def pause(self, until: float) -> bool:
        """Wait a moment; False where nobody waits any more."""
        now = time.monotonic()
        with self._lock:
            due = now - self._said >= SAY_EVERY_S
            if due:
                self._said = now
        if due:
            tell(
                f"{self.server} still does not answer, after {spelled(now - self._began)}; {spelled(until - now)} left"
            )
        return not self._hurry.wait(min(PAUSE_S, max(0.0, until - now)))

    def end(self, *, answered: bool) -> None:
        """A call waits no more."""
        with self._lock:
            self._waiting -= 1
            last, passed = self._waiting == 0, time.monotonic() - self._began
        if last and answered:
            tell(f"{self.server} answers again, after {spelled(passed)}")


class Wait:
    """The wait of one call."""

    def __init__(self, outage: Outage, timeout_s: float) -> None:
        self._outage = outage
        self._timeout_s = 0.0 if _MODE.at_once else timeout_s
        self._until: float | None = None
        self._first: StoreUnavailable | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._until is not None:
            self._outage.end(answered=kind is None)
        if kind is not None and not issubclass(kind, Exception):
            self._outage.hurry()  # the process ends, and what it still has to say to the server is not worth a wait

    @property
    def probing(self) -> bool:
        """Whether to see first whether the server answers at all."""
        return self._outage.last_error is not None

    def refuse_in_vain(self) -> None:
        """StoreUnavailable where nobody waits any more for a server that has just failed to answer."""
        if self._outage.hurrying and self._outage.fresh and self._outage.last_error is not None:
            raise self._outage.last_error

    def after(self, error: StoreUnavailable) -> None:
        """Wait a moment after a failure, or raise it where the timeout has passed."""
        self._outage.note(error)
        if self._timeout_s == 0 or self._outage.hurrying:
            raise error
        if self._until is None:
            self._until = time.monotonic() + self._timeout_s
            self._first = error
            self._outage.begin(self._timeout_s)
        if time.monotonic() >= self._until:
            self._outage.hurry()
            raise StoreUnavailable(f"{self._first} (waited for {spelled(self._timeout_s)}){_remedy(self._outage)}")
        if not self._outage.pause(self._until):
            raise error


class _Mode(threading.local):
    at_once = False
    under_way = False


_MODE = _Mode()
_OUTAGES: dict[str, Outage] = {}
_LOCK = threading.Lock()


def outage_of(server: str) -> Outage:
    """The one that all calls of this process to a server share."""
    with _LOCK:
        return _OUTAGES.setdefault(server, Outage(server))


def stop_waiting() -> None:
    """End every wait for S3 in this process: it ends, and what it still has to do there is not worth one."""
    with _LOCK:
        outages = list(_OUTAGES.values())
    for outage in outages:
        outage.hurry()


@contextmanager
def at_once() -> Iterator[None]:
    """The calls of this thread inside wait for nothing: what they do is done again soon, or is not needed."""
    before, _MODE.at_once = _MODE.at_once, True
    try:
        yield
    finally:
        _MODE.at_once = before


@contextmanager
def under_way() -> Iterator[None]:
    """A store that this thread opens inside is waited for as in the middle of work: others have used it before."""
    before, _MODE.under_way = _MODE.under_way, True
    try:
        yield
    finally:
        _MODE.under_way = before


def timeout_at_start(outage: Outage, timeout_s: float) -> float:
    """How long to wait for a server when a store is opened."""
    return timeout_s if outage.answered or _MODE.under_way else min(timeout_s, START_S)


def spelled(seconds: float) -> str:
    """`45 s`, `15 min`"""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _remedy(outage: Outage) -> str:
    if outage.answered:
        return "; PPOFLOW_STORE_TIMEOUT_S=SECONDS waits longer"
    return f": is {outage.server} the right address (AWS_ENDPOINT_URL), and can this machine reach it?"
