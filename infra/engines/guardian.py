"""Stands between ppoflow and a program that it started, and ends that program and all its descendants in time.

    python -I -S infra/engines/guardian.py <lifeline-fd> -- command…

It runs alone (standard library only, started in about 15 ms, 11 MB) and does four things:

1. makes itself child subreaper, so that whatever the command leaves behind becomes a child of the guardian, even after
   a double fork or a setsid;
2. starts the command in a session of its own, with PR_SET_PDEATHSIG, so that the command dies if the guardian does;
3. waits until the command ends, or its parent ends (end of file on the lifeline, or the parent's pidfd; both work under
   SIGKILL and, other than PR_SET_PDEATHSIG, do not depend on the thread that started us), or SIGTERM arrives;
4. SIGKILLs its children until none is left, and exits with the command's status, 128 + n after signal n.

The pipes on stdin and stdout are the command's alone: the guardian lets go of them, so both ends see end of file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127


def main(arguments: list[str]) -> int:
    if len(arguments) < 4 or arguments[2] != "--":
        print(f"usage: {arguments[0]} <lifeline-fd> -- command…, not {arguments[1:]}", file=sys.stderr)
        return 2
    lifeline = int(arguments[1])
    os.set_inheritable(lifeline, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print(f"guardian: no child subreaper: {os.strerror(ctypes.get_errno())}: Linux 3.4 needed", file=sys.stderr)
        return NOT_STARTED
    signals = watch_signals()
    command = start(arguments[3:], libc)
    release_pipes()
    status = wait_for_end(command, signals, lifeline)
    return exit_code(kill_children(command, status))


def watch_signals() -> int:
    """A descriptor that becomes readable, one byte per signal, on SIGCHLD and SIGTERM; SIGINT and SIGHUP do nothing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler and not SIG_IGN: exec puts it back to the default, so the command does not inherit our deafness.
        signal.signal(number, _take_note)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _take_note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has the number already."""


def start(command: list[str], libc: ctypes.CDLL) -> int:
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guardian:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode())
    os._exit(NOT_STARTED)


def release_pipes() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def wait_for_end(command: int, signals: int, lifeline: int) -> int | None:
    """The command's wait status, or None when the parent ended or SIGTERM came first."""
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    with contextlib.suppress(OSError):  # an old kernel has no pidfd: the lifeline alone must do
        # A fork of the parent (multiprocessing does that) holds a copy of the lifeline; the pidfd has no copies.
        poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if ready - {signals}:
            return None
        noted = os.read(signals, 512)
        if (status := reap(command)) is not None or signal.SIGTERM in noted:
            return status


def reap(command: int) -> int | None:
    """Collects every child that has ended; the command's status if it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == command:
            status = ended


def kill_children(command: int, status: int | None) -> int:
    """SIGKILLs children until there is none. Grandchildren become children as their parents go; unreaped pids are ours,
    so no stranger can be hit. A process that the kernel holds (disk, driver) is waited for: nobody else would."""
    pause = 0.001
    while True:
        for pid in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
        ended = reap(command)
        status = ended if status is None else status
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return signal.SIGKILL if status is None else status


def children_of(parent: int) -> list[int]:
    children = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name in parentheses may hold anything, so count from its end: state, parent, …
                if int(stat.read().rpartition(b")")[2].split()[1]) == parent:
                    children.append(int(name))
    return children


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
