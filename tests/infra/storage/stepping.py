"""Work in a thread that goes on only while it is let: so others can act between any two of its operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.infra.storage.faulty_files import Died


class Stepping:
    """A process that waits before each operation, which calls `_wait`, until `step` lets it go on.

    It works in a thread of its own, but never at the same time as the one that calls `step`. What is called outside
    `begin` is done at once. `_dead` is of the class that this is mixed into.
    """

    _dead: bool

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.work: str | None = None
        self._left = 0
        self._turn, self._handed_back = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None

    def begin(self, work: str, action: Callable[[], Any]) -> None:
        """Get ready for some work; nothing of it is done before `step`."""
        assert self.work is None
        self.work = work
        threading.Thread(target=self._run, args=(action,), daemon=True).start()

    def step(self, operations: int) -> bool:
        """Do at most this many operations (fewer where a lock is held by another process); whether the work is done."""
        assert self.work is not None
        self._left = operations
        self._turn.release()
        self._handed_back.acquire()
        if self.work is None and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self.work is None

    def die(self) -> None:
        """End at once, as by SIGKILL: what was written stays, locks are free."""
        self._dead = True
        if self.work is not None:
            with suppress(Died):
                self.step(1)

    def _wait(self) -> None:
        if self.work is None or self._dead:
            return
        if self._left <= 0:
            self._handed_back.release()
            self._turn.acquire()
        self._left -= 1

    def _run(self, action: Callable[[], Any]) -> None:
        self._turn.acquire()
        try:
            action()
        except BaseException as error:
            self._failure = error
        self.work = None
        self._handed_back.release()
