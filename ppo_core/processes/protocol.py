"""The engine's side of the seam: JSON documents on standard input and output, one per line.

    job    {"id", "name", "inputs": {name: {"path", "digest"}}, "output", "spec"}, perhaps "reports_rows"
    reply  {"event": "progress", ...}*  then  {"event": "result", ...} or {"event": "error", ...}

Tensors never cross, files do. Standard output belongs to the protocol: `serve` keeps it for itself and points the
process's own standard output at the log, so that prints of user code and libraries cannot break a reply.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ppo_core.processes.permissions import Permissions
from ppo_core.records import InputError

Report = Callable[[int, int, str, Sequence[Mapping[str, Any]]], None]
"""Takes what is done, of how many, a note, and rows as JSON can say them."""


@dataclass(frozen=True)
class JobInput:
    """A local folder or file with the digest of what it holds."""

    path: Path
    digest: str


@dataclass(frozen=True)
class Job:
    """One request: read `inputs`, write the folder `output`, obey `spec`, call `progress(done, total, note)` often.

    `permissions` are this machine's. `report`, progress with rows of the result that are finished, is there where who
    sent the job wants them before its end.
    """

    name: str
    inputs: Mapping[str, JobInput]
    output: Path
    spec: Mapping[str, Any]
    progress: Callable[[int, int, str], None]
    permissions: Permissions = field(default_factory=Permissions)
    report: Report | None = None


Handler = Callable[[Job], dict[str, Any]]


class EngineDefect(RuntimeError):
    """The engine's state can no longer be trusted: it reports this and ends, so that a fresh one takes over.

    `retryable`: whether the same job may come out otherwise there.
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


def take_over_stdout() -> TextIO:
    """Keep the protocol's stream private and send every later print to the log. Call before heavy imports."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def take_over_stdin() -> TextIO:
    """Keep the jobs private: user code, and what it starts, reads an empty input instead of the next job."""
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return jobs


def write_log_to(job: Job) -> dict[str, Any]:
    """Have what this process prints from now on at the end of another file."""
    log = os.open(job.spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    return {}


def serve(handlers: Mapping[str, Handler], replies: TextIO, permissions: Permissions) -> NoReturn:
    """Answer jobs until standard input ends, then end the process; an EngineDefect is reported and ends it too."""
    handlers = {write_log_to.__name__: write_log_to, **handlers}
    for line in take_over_stdin():
        document = json.loads(line)
        job_id = document["id"]

        def send(event: str, job_id: int = job_id, **fields: Any) -> None:
            replies.write(json.dumps({"event": event, "id": job_id, **fields}) + "\n")
            replies.flush()

        started = time.perf_counter()
        try:
            result = handlers[document["name"]](_job(document, send, permissions))
            send("result", seconds=time.perf_counter() - started, result=result)
        except Exception as error:
            with suppress(OSError):  # of a full disk: the reason arrives all the same
                traceback.print_exc()
            ending = isinstance(error, EngineDefect)
            retryable = error.retryable if isinstance(error, EngineDefect) else not isinstance(error, InputError)
            name, message = type(error).__name__, str(error)
            send("error", error={"type": name, "message": message, "retryable": retryable, "ending": ending})
            if ending:
                os._exit(1)
    # Tearing down CUDA, gloo and vLLM takes seconds and may hang; everything that matters is in files already.
    os._exit(0)


def _job(document: Mapping[str, Any], send: Callable[..., None], permissions: Permissions) -> Job:
    def progress(done: int, total: int, note: str) -> None:
        send("progress", done=done, total=total, note=note)

    def report(done: int, total: int, note: str, rows: Sequence[Mapping[str, Any]]) -> None:
        send("progress", done=done, total=total, note=note, rows=list(rows))

    return Job(
        name=document["name"],
        inputs={name: JobInput(Path(i["path"]), i["digest"]) for name, i in document["inputs"].items()},
        output=Path(document["output"] or os.devnull),
        spec=document["spec"],
        progress=progress,
        permissions=permissions,
        report=report if document.get("reports_rows") else None,
    )
