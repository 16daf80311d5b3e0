"""Ends processes of a stack that nobody looks after any more, and never a stranger: all bear its mark."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from infra.deploy.stack.service import StackError

MARK = "PPOFLOW_STACK_MARK"
KILL_TIMEOUT_S = 10.0
POLL_S = 0.05


def end_marked(mark: str, *, timeout_s: float, children: bool) -> None:
    """End what bears a mark that begins so, and what runs below it: by SIGTERM, and after that time by SIGKILL.

    psutil compares start times before it signals, so whoever has got the number of one that is gone is not hit.
    """
    known: set[psutil.Process] = set()
    asked: set[psutil.Process] = set()
    began = time.monotonic()
    while known := {one for one in known | set(_marked(mark, children=children)) if _lives(one)}:
        waited = time.monotonic() - began
        if waited > timeout_s + KILL_TIMEOUT_S:
            pids = ", ".join(str(one.pid) for one in known)
            raise StackError(f"processes {pids} survive SIGKILL: look at them with ps -o pid,stat,args")
        for one in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                if waited > timeout_s:
                    one.kill()
                elif one not in asked:
                    one.terminate()
        asked |= known
        time.sleep(POLL_S)


def _marked(mark: str, *, children: bool) -> list[psutil.Process]:
    """Without those of containers, which the host sees: a stack in one may have our passwords, and so our mark."""
    ours = os.readlink("/proc/self/ns/pid")
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark)
            if is_marked and os.readlink(f"/proc/{process.pid}/ns/pid") == ours:
                found += [process, *(process.children(recursive=True) if children else ())]
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
