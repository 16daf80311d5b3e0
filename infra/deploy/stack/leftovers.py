"""Ends what a server leaves behind when it ends: a child of one that was killed may still have the port of the next.

supervisord starts this as a listener to its events (http://supervisord.org/events.html), and it needs nothing but the
standard library. A server's main process leads a process group, which has its number for as long as anyone is in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

PATIENCE_S = 2.0
POLL_S = 0.02


def main() -> None:
    """Hear of one event after the other."""
    while True:
        print("READY", flush=True)
        header = _fields(sys.stdin.readline())
        _end_group(int(_fields(sys.stdin.read(int(header["len"])))["pid"]))
        print("RESULT 2\nOK", end="", flush=True)


def _fields(line: str) -> dict[str, str]:
    return dict(field.split(":", 1) for field in line.split())


def _end_group(group: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
