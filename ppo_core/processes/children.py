"""Ends an engine when a process that it depends on ends: who waits for the answer of a dead process waits for ever."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when `parent`, which started it, or the thread of it that did, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the kernel was told
        os._exit(1)


class ChildWatch:
    """From now on this process ends with the first of these children, until `retire` is called."""

    def __init__(self, children: Sequence[BaseProcess]) -> None:
        self._children = list(children)
        self._retired = False
        if self._children:
            threading.Thread(target=self._watch, daemon=True, name="child-watch").start()

    def retire(self) -> None:
        """The children may end: this process goes on without them."""
        self._retired = True

    def _watch(self) -> None:
        wait([child.sentinel for child in self._children])
        if not self._retired:
            ended = [f"{child.name} (status {child.exitcode})" for child in self._children if not child.is_alive()]
            with suppress(OSError):  # of a full disk
                print(f"ending, because of the end of {', '.join(ended)}", file=sys.stderr, flush=True)
            os._exit(1)
