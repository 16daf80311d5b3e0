"""Calls to something that may hang or be away: a deadline for each, and a pause after a failure."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

AT_END_S = 10.0


class CircuitBreaker:
    """Runs one call at a time on a thread of its own, so that no call costs more than its deadline.

    A call that fails gives None, its reason stays in `last_error`; `outage` says whether waiting may help. After an
    outage calls give None at once for `back_off_s` seconds, and for as long as a call that missed its deadline is under
    way (it may yet succeed, unseen).

    One that is still under way when the process ends is given a few seconds: Python ends its thread in the middle of
    what it does, and where that is C++, such as Matplotlib's, the process aborts with status 134, whatever it has done.
    """

    def __init__(self, back_off_s: float, is_outage: Callable[[Exception], bool]) -> None:
        self.last_error: str | None = None
        self.outage = False
        self._back_off_s = back_off_s
        self._is_outage = is_outage
        self._retry_at = 0.0
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()

    def available(self) -> bool:
        return time.monotonic() >= self._retry_at and (self._worker is None or not self._worker.is_alive())

    def reset(self) -> None:
        """End the pause: the next call is made at once."""
        self._retry_at = 0.0

    def call(self, action: Callable[[], T], deadline_s: float) -> T | None:
        if not self._lock.acquire(timeout=deadline_s):  # another thread's call is under way
            return None
        try:
            if not self.available():
                return None
            outcome: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
            # A daemon: a hanging call must not keep the process from ending.
            self._worker = threading.Thread(target=_run, args=(action, outcome), daemon=True, name="circuit-breaker")
            self._worker.start()
            try:
                result, error = outcome.get(timeout=deadline_s)
            except queue.Empty:
                atexit.register(self._worker.join, AT_END_S)
                self._note(TimeoutError(f"no answer within {deadline_s:g} s"), outage=True)
                return None
            self._worker.join()
            if error is not None:
                self._note(error, outage=self._is_outage(error))
            return result
        finally:
            self._lock.release()

    def _note(self, error: Exception, *, outage: bool) -> None:
        self.last_error, self.outage = f"{type(error).__name__}: {error}", outage
        if outage:
            self._retry_at = time.monotonic() + self._back_off_s


def _run(action: Callable[[], T], outcome: queue.SimpleQueue[tuple[T | None, Exception | None]]) -> None:
    try:
        outcome.put((action(), None))
    except Exception as error:  # whatever goes wrong there must not stop what goes on here; the caller gets it as text
        outcome.put((None, error))
