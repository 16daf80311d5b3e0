"""A look at processes that may end at any moment."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.waiting import LONG_S

PR_SET_CHILD_SUBREAPER = 36


def outlived(pids: Iterable[int], *, within_s: float = LONG_S) -> list[int]:
    """Those of `pids` that still run after that time; returns as soon as there is none."""
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def runs(pid: int) -> bool:
    """Whether it is there, and more than an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


@contextmanager
def adopting() -> Iterator[None]:
    """Processes inside whose parents end stay below this one, where tests find them."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none where it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
