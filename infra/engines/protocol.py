"""What we and an engine say to each other: one JSON document per line, a job down its stdin, replies up its stdout.

    job    {"id": 7, "name": "update_policy", "inputs": {"experience": {"path": "/…", "digest": "9f…"}},
            "output": "/…" or null, "spec": {…}}                             perhaps with "reports_rows": true
    reply  {"event": "progress", "id": 7, "done": 3, "total": 8, "note": "epoch 1"}      any number of times, then
                                                                                         (with "rows": [{…}], if asked)
           {"event": "result", "id": 7, "seconds": 1.25, "result": {…}}                  one of these two
           {"event": "error", "id": 7, "error": {"type": "InputError", "message": "…", "retryable": false}}

End of file on stdin means: end. Anything else on stdout is a defect of the engine.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

WRITE_LOG_TO = "write_log_to"
"""A job that every engine knows: what it prints goes from then on to the end of the file `log` of the job's spec."""
LONGEST_LINE = 64 * 2**20
SHOWN_OF_A_LINE = 500


@dataclass(frozen=True)
class EngineInput:
    """A local file or folder that a job reads, and the digest of the artifact in it."""

    path: Path
    digest: str


@dataclass(frozen=True)
class EngineJob:
    """`reports_rows`: the engine may hand on rows of its result as they are finished (`EngineProgress.rows`)."""

    name: str
    inputs: Mapping[str, EngineInput]
    output: Path | None
    spec: Mapping[str, Any]
    reports_rows: bool = False


@dataclass(frozen=True)
class EngineReply:
    """`seconds` were spent inside the engine."""

    result: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class EngineProgress:
    """How far a job is; `rows` are those finished since the last message, of a job that reports them."""

    engine: str
    job: str
    done: int
    total: int
    note: str
    rows: tuple[Mapping[str, Any], ...] = ()


OnProgress = Callable[[EngineProgress], None]


def printed(line: str) -> str:
    """A line of an engine's log as a terminal may have it: without control characters, and not endless."""
    shown = "".join(" " if c.isspace() else c for c in line if c.isprintable() or c.isspace())
    return shown if len(shown) <= SHOWN_OF_A_LINE else f"{shown[:SHOWN_OF_A_LINE]}…"


class EngineError(RuntimeError):
    """A job failed. `retryable` says whether the same job can succeed when it is sent again. Survives pickling."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class EngineJobError(EngineError):
    """The engine is well and refused the job, or failed at it: `error_type` and `reason` are the engine's own words."""

    def __init__(self, message: str, *, retryable: bool = False, error_type: str = "", reason: str = "") -> None:
        super().__init__(message, retryable=retryable)
        self.error_type = error_type
        self.reason = reason


class EngineDied(EngineError):
    """The process ended, or broke the protocol and was ended. The message carries the tail of its log."""


class EngineTimeout(EngineError):
    """The engine gave no sign of life for `timeout_s` and was killed."""


class EngineClosed(EngineError):
    """close() was called before or during the job. Not retryable: whoever closed the engine is ending the run."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message, retryable=retryable)


class Engine(Protocol):
    """Runs one job at a time somewhere: in a child process here, or on another machine."""

    name: str

    def start(self) -> None:
        """Begins to start it and returns at once."""

    def run(self, job: EngineJob, *, timeout_s: float, on_progress: OnProgress | None = None) -> EngineReply:
        """Starts it if need be, and blocks until the reply; raises EngineError."""
        ...

    def close(self) -> None:
        """Ends it and everything below it."""


class ProtocolViolation(Exception):
    """A line that is no reply to the job."""


class ChannelEnded(Exception):
    """The other side is gone."""


class ChannelSilent(Exception):
    """The other side sent no complete line, or took none, in time."""


@dataclass(frozen=True)
class Failure:
    error_type: str
    message: str
    retryable: bool
    ending: bool = False  # the process ends with this reply: a fresh one must take the next job

    def error(self, *, engine: str, job: str) -> EngineJobError:
        """As what run() raises."""
        message = f"engine {engine!r}, job {job!r}: {self.error_type}: {self.message}"
        return EngineJobError(message, retryable=self.retryable, error_type=self.error_type, reason=self.message)


def encode_job(number: int, job: EngineJob) -> bytes:
    inputs = {name: {"path": str(given.path.absolute()), "digest": given.digest} for name, given in job.inputs.items()}
    output = None if job.output is None else str(job.output.absolute())
    document = {"id": number, "name": job.name, "inputs": inputs, "output": output, "spec": dict(job.spec)}
    return json.dumps(document | ({"reports_rows": True} if job.reports_rows else {})).encode() + b"\n"


def decode_reply(line: bytes, number: int, *, engine: str, job: str) -> EngineProgress | EngineReply | Failure:
    """The reply in `line` to job `number`; ProtocolViolation when it is anything else."""
    try:
        document = json.loads(line)
        if document["id"] != number:
            raise ProtocolViolation(f"a reply to job {document['id']!r} instead of {number}")
        event = document["event"]
        if event == "progress":
            done, total, note = int(document["done"]), int(document["total"]), str(document.get("note", ""))
            rows = tuple(dict(row) for row in document.get("rows", ()))
            return EngineProgress(engine=engine, job=job, done=done, total=total, note=note, rows=rows)
        if event == "result":
            return EngineReply(result=dict(document["result"]), seconds=float(document["seconds"]))
        if event == "error":
            error = document["error"]
            ending = error.get("ending") is True
            return Failure(str(error["type"]), str(error["message"]), error["retryable"] is True, ending)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolViolation(f"{_excerpt(line)} ({type(error).__name__}: {error})") from None
    raise ProtocolViolation(f"event {event!r}, which is none of progress, result, error")


def _excerpt(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 200 else text[:200] + "…")


class LineChannel:
    """Whole lines over a pair of pipes, with a limit on the time of each. `lifeline` becomes readable at the end."""

    def __init__(self, writing: int, reading: int, lifeline: int) -> None:
        os.set_blocking(writing, False)
        os.set_blocking(reading, False)
        self._writing = writing
        self._reading = reading
        self._lifeline = lifeline
        self._received = bytearray()

    def send(self, line: bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        rest = memoryview(line)
        while rest:
            self._wait(self._writing, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._writing, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChannelEnded from None

    def receive(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > LONGEST_LINE:
                raise ProtocolViolation(f"a line of more than {LONGEST_LINE} bytes")
            self._wait(self._reading, select.POLLIN, deadline)
            try:
                received = os.read(self._reading, 2**16)
            except BlockingIOError:
                continue
            if not received:
                raise ChannelEnded
            self._received += received
            deadline = time.monotonic() + timeout_s  # it speaks
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._lifeline, select.POLLIN)
        while True:
            # At least one look even when the time is over: what has arrived counts. And one look a second: a signal
            # that the kernel gave to another thread does not wake this one, and Ctrl-C must not wait for the engine.
            left = deadline - time.monotonic()
            ready = {found for found, _ in poll.poll(1000 * min(1.0, max(0.0, left)))}
            if descriptor in ready:  # first: a last reply may still lie in the pipe
                return
            if ready:
                raise ChannelEnded
            if left <= 0:
                raise ChannelSilent
