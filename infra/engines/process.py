"""Starts, watches, times out, restarts and ends engines; knows nothing of what they compute."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.engines.guarded_process import KILL_TIMEOUT_S, GuardedProcess
from infra.engines.protocol import (
    WRITE_LOG_TO,
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
]

CLOSE_GRACE_S = 3.0
HAND_OVER_S = 60.0


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

    def take_over(self, other: EngineProcess) -> bool:
        """Go on with the process of another engine, and all that it has imported: whether there was one, started in the
        same way and at rest. The other one has none afterwards; what it has logged stands in this one's log too."""
        if (other._command, other._environment) != (self._command, self._environment) or self._process is not None:
            return False
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with other._state_lock:
            process = other._process
        if process is None:
            return False
        try:
            process.move_log(self._log)
            other.run(EngineJob(WRITE_LOG_TO, {}, None, {"log": str(self._log.absolute())}), timeout_s=HAND_OVER_S)
        except (OSError, EngineError):
            return False
        with other._state_lock, self._state_lock:
            if other._process is not process or other._closed:
                return False
            self._process, self._channel, self._closed = process, other._channel, False
            other._process = other._channel = None
        return True

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
