"""Starts a server in the background and ends it later, from another process, without ever hitting a stranger.

A server's main process is known by its record (written before it begins, see launch.py), its descendants by the tree
below it, and what they left behind by the mark in its environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from infra.deploy.stack.service import Service, StackError
from infra.process_identity import ProcessIdentity, identity_of_token, is_alive, this_process
from infra.settings import child_environment

LAUNCH = Path(__file__).with_name("launch.py")
MARK = "PPOFLOW_STACK_MARK"
KILL_PATIENCE_S = 10.0
LAUNCH_PATIENCE_S = 60.0
TAIL_LINES = 20
TAIL_BYTES = 2**16


class Daemon:
    """One service's process: started by one command of ours, found again by the next."""

    def __init__(self, service: Service, *, folder: Path, stack: str) -> None:
        self.service = service
        self.log = folder / "logs" / f"{service.name}.log"
        self._record = folder / "run" / service.name
        self._mark = f"{stack}.{service.name}"
        self._log_start = 0

    def running(self) -> bool:
        process, _ = self._recorded()
        return process is not None and is_alive(process) is True

    def is_current(self) -> bool:
        """Whether it runs with the command and the settings that it would be started with now."""
        return self.running() and self._recorded()[1] == self._digest()

    def listening(self) -> set[tuple[str, int]]:
        """The TCP addresses on which it, or a process below it, takes connections."""
        process, _ = self._recorded()
        found: set[tuple[str, int]] = set()
        if process is None or not is_alive(process):
            return found
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(process.pid)
            for one in (main, *main.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    sockets = one.net_connections(kind="tcp")
                    found |= {tuple(socket.laddr) for socket in sockets if socket.status == psutil.CONN_LISTEN}
        return found

    def has_its_ports(self) -> bool:
        """Whether the ports of the service are this one's: an answer alone may be a stranger's."""
        return {port.number for port in self.service.ports} <= {port for _, port in self.listening()}

    def start(self) -> None:
        """Start it and return at once; it outlives us. What is left of one before it ends first."""
        self.stop()
        service = self.service
        _, _, rest = this_process().token.split("_", 2)
        launch = [sys.executable, "-I", "-S", str(LAUNCH), str(self._record), self._digest(), rest, service.user, "--"]
        with open(self.log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
            self._log_start = log.tell()
            child = subprocess.Popen(
                [*launch, *service.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=service.folder,
                env=child_environment({**service.environment, MARK: self._mark}, without=service.hidden),
                start_new_session=True,
            )
        self._wait(lambda: self._record.exists() or child.poll() is not None, LAUNCH_PATIENCE_S)

    def stop(self) -> None:
        """End it and everything below it: in its own way first, by SIGKILL when that takes longer than its grace."""
        process, _ = self._recorded()
        below: Sequence[psutil.Process] = ()
        if process is not None and is_alive(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children(recursive=True)
            _signal_if(process.pid, lambda: is_alive(process) is True, self.service.stop_signal)
            self._wait(lambda: not is_alive(process), self.service.grace_s)
            _signal_if(process.pid, lambda: is_alive(process) is True, signal.SIGKILL)
        deadline = time.monotonic() + KILL_PATIENCE_S
        while (left := self._left(process, below)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            raise StackError(
                f"{self.service.name}: processes {left} survive SIGKILL: look at them with ps -o pid,stat,args"
            )
        self._record.unlink(missing_ok=True)

    def tail(self) -> str:
        """The last lines that it wrote since our start()."""
        if not self.log.exists():
            return f"{self.log} is empty"
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join([f"The last lines of {self.log}:", *(lines[-TAIL_LINES:] or ["(nothing)"])])

    def _left(self, process: ProcessIdentity | None, below: Sequence[psutil.Process]) -> list[int]:
        """SIGKILL what is left, and say what that was."""
        left = [process.pid] if process is not None and is_alive(process) else []
        for child in below:
            # psutil compares the start time before it signals.
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    left.append(child.pid)
        for pid in self._marked():
            _signal_if(pid, lambda pid=pid: self._bears_mark(pid), signal.SIGKILL)  # type: ignore[misc]
            left.append(pid)
        return left

    def _marked(self) -> list[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and self._bears_mark(pid)]

    def _bears_mark(self, pid: int) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _recorded(self) -> tuple[ProcessIdentity | None, str]:
        try:
            token, digest = self._record.read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            return None, ""
        return identity_of_token(token), digest

    def _digest(self) -> str:
        service = self.service
        shape = [list(service.command), sorted(service.environment.items()), service.user, str(service.folder)]
        return hashlib.sha256(json.dumps(shape).encode()).hexdigest()

    @staticmethod
    def _wait(done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            time.sleep(0.02)


def _signal_if(pid: int, still_it: Callable[[], bool], number: signal.Signals) -> None:
    """Signal a process through a descriptor that was opened before it was looked at: no later one of its pid is hit."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if still_it():
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
