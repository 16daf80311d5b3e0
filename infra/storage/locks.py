"""Waiting for a lock file of a store; after a while the user is told which process has it."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from infra.storage.telling import tell

TOLD_AFTER_S = 10.0


def lock(descriptor: int, path: Path, told_after_s: float = TOLD_AFTER_S) -> None:
    """Wait for the lock of an open file, however long; after `told_after_s`, say who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        teller = threading.Timer(told_after_s, _tell, (descriptor, path))
        teller.daemon = True
        teller.start()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            teller.cancel()


def _tell(descriptor: int, path: Path) -> None:
    tell(f"waiting for {path}, which {holder_of(descriptor)} holds: if that is stopped, let it go on or end it")


def holder_of(descriptor: int) -> str:
    """The process on this machine that holds the lock of an open file, in words."""
    file = os.fstat(descriptor)
    number = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        match line.split():
            case [_, "FLOCK", _, _, pid, place, *_] if place == number:
                return f"process {pid}"
    return "a process"
