"""A small real engine for tests: speaks the protocol of infra/engines/protocol.py and misbehaves on demand.

With the argument `die` it ends before the first job, as a failed import would.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Reply = Callable[..., None]
FOR_EVER_S = 3600
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"


def echo(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    return {"pid": os.getpid(), **job}


def talk(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Prints as user code does, by Python and past it."""
    print(job["spec"]["text"])
    os.system(f"echo from a shell: {job['spec']['text']}")
    return {}


def sleep(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Says so before it falls asleep."""
    began = time.time()
    reply(event="progress", done=0, total=1, note="asleep")
    time.sleep(job["spec"]["seconds"])
    return {"began": began, "ended": time.time()}


def refuse(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    error = {"type": "InputError", "message": "no such column", **job["spec"]}
    reply(event="error", error=error)
    return {}


def crash(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    print("the last words")
    if "signal" in job["spec"]:
        os.kill(os.getpid(), job["spec"]["signal"])
        time.sleep(60)
    os._exit(job["spec"]["code"])


def garbage(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    reply(raw=job["spec"]["line"].encode() + b"\n")
    return {}


def spawn(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Children that left our session, ignore SIGTERM and (the second) have no parent any more."""
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    orphan = f"import subprocess; print(subprocess.Popen([{sys.executable!r}, '-c', {STUBBORN!r}], "
    orphan += "start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    orphan_pid = subprocess.check_output([sys.executable, "-c", orphan])
    return {"pids": [os.getpid(), os.getppid(), child.pid, int(orphan_pid)]}


def hang(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Says nothing and ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(FOR_EVER_S)
    return {}


def progress(job: dict[str, Any], reply: Reply) -> dict[str, Any]:
    for done in range(1, job["spec"]["total"] + 1):
        time.sleep(job["spec"]["seconds"])
        rows = {"rows": [{"number": done}]} if job.get("reports_rows") else {}
        reply(event="progress", done=done, total=job["spec"]["total"], note=f"epoch {done}", **rows)
    return {}


JOBS = {job.__name__: job for job in (echo, talk, sleep, refuse, crash, garbage, spawn, hang, progress)}


def main() -> None:
    replies = os.dup(1)
    os.dup2(2, 1)
    if "die" in sys.argv:
        sys.exit("ModuleNotFoundError: No module named 'vllm'")
    for line in sys.stdin:
        job = json.loads(line)

        def reply(number: int = job["id"], raw: bytes = b"", **document: Any) -> None:
            os.write(replies, raw or json.dumps({"id": number, **document}).encode() + b"\n")

        began = time.monotonic()
        result = JOBS[job["name"]](job, reply)
        if job["name"] != "refuse":
            reply(event="result", seconds=time.monotonic() - began, result=result)


if __name__ == "__main__":
    main()
