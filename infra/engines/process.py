"""Starts, watches, times out, restarts and ends engines; knows nothing of what they compute.

    ours                     guardian.py                      python -m ppo_core.engines.rollout
    EngineProcess ──lifeline──► (subreaper) ──PDEATHSIG──► engine ──► its workers, ranks, …
         └───────────────── stdin, stdout: JSON lines ──────┘

Whatever dies, what is below it dies too: we (also by SIGKILL) → the guardian sees the lifeline end and kills the whole
tree; the guardian → the engine gets SIGKILL, and we kill the rest by the token in their environment; the engine → the
guardian kills what it left behind. Nothing depends on the thread that started it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.engines.protocol import (
    ChannelEnded,
    ChannelSilent,
    Engine,
    EngineClosed,
    EngineDied,
    EngineError,
    EngineInput,
    EngineJob,
    EngineJobError,
    EngineProgress,
    EngineReply,
    EngineTimeout,
    Failure,
    LineChannel,
    OnProgress,
    ProtocolViolation,
    decode_reply,
    encode_job,
    printed,
)
from infra.settings import engine_environment

__all__ = [
    "Engine",
    "EngineClosed",
    "EngineDied",
    "EngineError",
    "EngineInput",
    "EngineJob",
    "EngineJobError",
    "EngineProcess",
    "EngineProgress",
    "EngineReply",
    "EngineTimeout",
    "GuardedProcess",
]

GUARDIAN = Path(__file__).with_name("guardian.py")
CLOSE_GRACE_S = 3.0
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


class EngineProcess:
    """An engine as a child process here; `environment` comes on top of what every engine sees. `timeout_s` of run()
    includes the program's imports after a start."""

    def __init__(
        self,
        name: str,
        program: str,
        *,
        log: Path,
        environment: Mapping[str, str] = {},
        command: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-m", program] if command is None else list(command)
        self._log = log
        # Unbuffered, so that the tail of the log holds what was printed last before a kill.
        self._environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **environment}
        self._numbers = itertools.count(1)
        self._job_lock = threading.Lock()  # held for a whole job
        self._state_lock = threading.Lock()  # guards the three below, never held for long
        self._process: GuardedProcess | None = None
        self._channel: LineChannel | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process and does not wait for it. After close(), opens the engine again."""
        with self._state_lock:
            self._closed = False
            self._launched()

    def run(self, job: EngineJob, *, timeout_s: float, on_progress: OnProgress | None = None) -> EngineReply:
        """One job. After anything but a reply (death, silence, an exception of on_progress, Ctrl-C) the process is
        killed, because its next line would answer a question that nobody asks any more; the next run() starts anew."""
        number = next(self._numbers)
        line = encode_job(number, job)
        with self._job_lock:
            with self._state_lock:
                if self._closed:
                    raise EngineClosed(f"engine {self.name!r} is closed: call start() before job {job.name!r}")
                process, channel = self._launched()
            try:
                channel.send(line, timeout_s)
                while True:
                    reply = decode_reply(channel.receive(timeout_s), number, engine=self.name, job=job.name)
                    if isinstance(reply, Failure):
                        if reply.ending:
                            self._discard(process)
                        raise reply.error(engine=self.name, job=job.name)
                    if isinstance(reply, EngineReply):
                        return reply
                    if on_progress is not None:
                        on_progress(reply)
            except EngineJobError:
                raise
            except (ChannelEnded, ChannelSilent, ProtocolViolation) as error:
                raise self._gave_up(process, job, error, timeout_s) from None
            except BaseException:
                self._discard(process)
                raise

    def close(self) -> None:
        """An idle engine gets end of file and 3 s; one with a job in flight is killed, and its run() raises."""
        with self._state_lock:
            self._closed = True
            process = self._process
        if process is None:
            return
        if self._job_lock.acquire(blocking=False):
            try:
                process.close_stdin()
                process.wait(CLOSE_GRACE_S)
                self._discard(process)
            finally:
                self._job_lock.release()
        else:
            process.kill()

    def _launched(self) -> tuple[GuardedProcess, LineChannel]:
        # One that died before its first job is kept: run() finds it dead and says why.
        if self._process is None or self._channel is None:
            seen = engine_environment(self._environment)
            self._process = GuardedProcess(self._command, log=self._log, environment=seen, pipes=True)
            self._channel = self._process.channel()
        return self._process, self._channel

    def _discard(self, process: GuardedProcess) -> None:
        process.kill()
        process.release()
        with self._state_lock:
            if self._process is process:
                self._process = self._channel = None

    def _gave_up(self, process: GuardedProcess, job: EngineJob, error: Exception, timeout_s: float) -> EngineError:
        ended = process.wait(KILL_TIMEOUT_S) if isinstance(error, ChannelEnded) else False
        self._discard(process)
        who = f"engine {self.name!r}, job {job.name!r}:"
        if self._closed:
            return EngineClosed(f"{who} the engine was closed before the job ended")
        if isinstance(error, ChannelSilent):
            what = (
                f"no message for timeout_s={timeout_s:g}, so it was killed with everything below it: "
                "raise the timeout if the work is that slow between two messages"
            )
            return EngineTimeout(f"{who} {what}. {process.tail()}")
        if isinstance(error, ProtocolViolation):
            return EngineDied(f"{who} it was ended, because its replies held {error}. {process.tail()}")
        ending = process.ending() if ended else "closed its replies without ending, and was killed"
        return EngineDied(f"{who} the process {ending}. {process.tail()}")
