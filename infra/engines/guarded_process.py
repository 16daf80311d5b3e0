"""A command with all its descendants, which ends when we do.

    ours                      guardian.py                       a command
    GuardedProcess ──lifeline──► (subreaper) ──PDEATHSIG──► process ──► its workers, ranks, …
          └──────────── stdin, stdout: as the caller wants them ──┘

Whatever dies, what is below it dies too: we (also by SIGKILL) → the guardian sees the lifeline end and kills the whole
tree; the guardian → the process gets SIGKILL, and we kill the rest by the token in their environment; the process → the
guardian kills what it left behind. Nothing depends on the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.engines.protocol import LineChannel, printed

GUARDIAN = Path(__file__).with_name("guardian.py")
KILL_TIMEOUT_S = 10.0
TAIL_LINES, TAIL_BYTES = 30, 2**16


class GuardedProcess:
    """A command in a session of its own that ends, with all its descendants, when we end or kill() is called. It sees
    `environment` alone. With `pipes`, stdin and stdout are ours; without, stdin is empty and stdout is the log."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        pipes: bool,
        keep: Sequence[int] = (),
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._token = f"PPOFLOW_GUARDED={uuid.uuid4().hex}"
        key, _, value = self._token.partition("=")
        self._lifeline, theirs = socket.socketpair()
        guardian = [sys.executable, "-I", "-S", str(GUARDIAN), str(theirs.fileno()), "--"]
        with theirs, log.open("ab") as log_file:
            self._log_start = log_file.tell()
            self._process = subprocess.Popen(
                [*guardian, *command],
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log_file,
                stderr=log_file,
                bufsize=0,
                env={**environment, key: value},
                pass_fds=[theirs.fileno(), *keep],
                start_new_session=True,
            )

    def channel(self) -> LineChannel:
        writing, reading = self._process.stdin, self._process.stdout
        if writing is None or reading is None:
            raise ValueError(f"the process that logs to {self.log} has no channel: start it with pipes=True")
        return LineChannel(writing.fileno(), reading.fileno(), self._lifeline.fileno())

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.running()

    def close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends everything. Safe from any thread, also while another one waits on the channel: that one sees the end."""
        with contextlib.suppress(OSError):
            # Not close(): a fork of ours may hold a copy, and another thread may be polling this descriptor.
            self._lifeline.shutdown(socket.SHUT_RDWR)
        if not self.wait(KILL_TIMEOUT_S):
            self._process.kill()
            self.wait(KILL_TIMEOUT_S)
        if self._guardian_was_killed():
            self._kill_leftovers()

    def release(self) -> None:
        """Closes our descriptors; only for the thread that uses the channel."""
        self._lifeline.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is None:
            return "does not end"
        if code < 0:
            return f"lost its guardian to {_signal_name(-code)}"
        if code - 128 in set(signal.Signals):
            cause = " (often: the machine ran out of memory)" if code == 128 + signal.SIGKILL else ""
            return f"was killed by {_signal_name(code - 128)}{cause}"
        return f"ended with exit code {code}"

    def tail(self) -> str:
        """The last lines that this process (not one before it) wrote to its log."""
        try:
            with self.log.open("rb") as log_file:
                log_file.seek(max(self._log_start, log_file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = [printed(line) for line in log_file.read().decode(errors="replace").splitlines()]
        except OSError as error:
            return f"Its log {self.log} cannot be read ({error.strerror})."
        return "\n".join([f"The last lines of {self.log}:", *(lines[-TAIL_LINES:] or ["(nothing)"])])

    def move_log(self, log: Path) -> None:
        """Look for its last lines at the end of another file, where what it has logged is copied to."""
        with self.log.open("rb") as old, log.open("ab") as new:
            start = new.tell()
            old.seek(self._log_start)
            shutil.copyfileobj(old, new)
        self.log, self._log_start = log, start

    def _guardian_was_killed(self) -> bool:
        return self._process.returncode is not None and self._process.returncode < 0

    def _kill_leftovers(self) -> None:
        """Without its guardian a tree is known only by the token in its environment."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (pids := _processes_with(self._token.encode())) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _processes_with(token: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if token in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
