"""Ends what a server leaves behind when it ends: a child of one that was killed may still have the port of the next.

supervisord starts this as a listener to its events (http://supervisord.org/events.html), and it needs nothing but the
standard library. A server's main process leads a process group, which has its number for as long as anyone is in it.
The event of one that ended in its first second (BACKOFF) does not name that number: there the groups of the server are
looked for whose leader is gone. All processes of a server have a variable in common; what stands in it before the name
of the server is our argument.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

TIMEOUT_S = 2.0
POLL_S = 0.02


def main() -> None:
    """Hear of one event after the other."""
    while True:
        print("READY", flush=True)
        header = _fields(sys.stdin.readline())
        event = _fields(sys.stdin.read(int(header["len"])))
        groups = [int(event["pid"])] if "pid" in event else without_leader(sys.argv[1], event["processname"])
        for group in groups:
            _end_group(group)
        print("RESULT 2\nOK", end="", flush=True)


def _fields(line: str) -> dict[str, str]:
    return dict(field.split(":", 1) for field in line.split())


def without_leader(mark: str, server: str) -> set[int]:
    """The process groups of a server whose leader is gone; none of a container, whose stack may have the same mark."""
    wanted, groups = f"{mark}{server}".encode(), set()
    ours = os.readlink("/proc/self/ns/pid")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_marked = wanted in (process / "environ").read_bytes().split(b"\0")
            if is_marked and os.readlink(f"{process}/ns/pid") == ours:
                groups.add(os.getpgid(int(process.name)))
    return {group for group in groups if not Path(f"/proc/{group}").exists()}


def _end_group(group: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
