"""A limit of processor time for what may compute without end, such as a regular expression that backtracks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

AGAIN_S = 0.1


class OutOfTime(Exception):
    """What ran had used up its processor time."""


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raise OutOfTime within, once this process has computed for so many seconds in there; for the main thread.

    Other processes on the same cores do not shorten it. Python's `re` looks for signals while it searches
    (`PyErr_CheckSignals` in `_sre`), so that it is ended too.
    """

    def stop(_number: int, _frame: object) -> NoReturn:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        try:
            # Again after that: Python ignores what is raised while it collects garbage.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, max(seconds, AGAIN_S))
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # also where time ran out just before the line above
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
