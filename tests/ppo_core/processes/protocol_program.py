"""An engine that does tiny jobs over the real protocol: `python -m tests.ppo_core.processes.protocol_program`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from ppo_core.processes.permissions import Permissions
from ppo_core.processes.protocol import EngineDefect, Job, serve, take_over_stdout
from ppo_core.records import InputError


def echo(job: Job) -> dict[str, Any]:
    inputs = {name: [str(given.path), given.digest] for name, given in job.inputs.items()}
    return {"inputs": inputs, "output": str(job.output), "spec": dict(job.spec), "pid": os.getpid()}


def talk(job: Job) -> dict[str, Any]:
    """Prints as user code and libraries do, by Python, past it, and from a child."""
    print("from print")
    os.write(1, b"from os.write\n")
    subprocess.run(["echo", "from a child"], check=True)
    sys.stdout.flush()
    job.progress(1, 2, "half – way")
    return {}


def hand_on(job: Job) -> dict[str, Any]:
    """Rows before the end, where they are wanted."""
    if job.report is not None:
        job.report(1, 2, "rows", [{"text": "ä"}, {"text": "\n"}])
    return {"wanted": job.report is not None}


def refuse(job: Job) -> dict[str, Any]:
    raise InputError("no such column: add it")


def fail(job: Job) -> dict[str, Any]:
    raise LookupError("no server")


def unspeakable(job: Job) -> dict[str, Any]:
    return {"object": object()}


def break_down(job: Job) -> dict[str, Any]:
    raise EngineDefect("half the weights moved")


def break_down_for_good(job: Job) -> dict[str, Any]:
    raise EngineDefect("half the weights moved", retryable=False)


if __name__ == "__main__":
    stream = take_over_stdout()
    jobs = (echo, talk, hand_on, refuse, fail, unspeakable, break_down, break_down_for_good)
    serve({job.__name__: job for job in jobs}, stream, Permissions())
