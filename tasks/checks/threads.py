"""Work aside, while a person may press Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def submit(pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Have a pool do work. A Ctrl-C that comes meanwhile is raised when the pool knows its thread.

    Python 3.11 lets a pool forget a thread in whose start it is interrupted: nothing waits for it at the end then, and
    its imports fail as if the interpreter were shutting down.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        return pool.submit(work, *args, **kwargs)
    pressed = list[int]()
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        return pool.submit(work, *args, **kwargs)
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            raise KeyboardInterrupt
