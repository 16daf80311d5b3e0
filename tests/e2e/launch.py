"""Starting runs as users do, in processes of their own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.prefect_server import PrefectServer
from tests.processes import runs
from tests.waiting import LONG_S

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "examples" / "arithmetic" / "smoke.yaml"
DEADLINE_S = 1200.0


def command(*arguments: str) -> list[str]:
    """`ppoflow …` with this interpreter."""
    return [sys.executable, "-m", "flows.cli", *arguments]


def environment(home: Path, **extra: str) -> dict[str, str]:
    """This process's environment with the run's state under `home`."""
    return {**os.environ, "PPOFLOW_HOME": str(home), "COLUMNS": "160", **extra}


@contextmanager
def one_server(home: Path) -> Iterator[None]:
    """Commands inside share a Prefect server, on the database of this home: else each of them starts its own."""
    server = PrefectServer(home / "prefect", port=0)
    server.start()
    with closing(server), pytest.MonkeyPatch.context() as shared:
        server.wait_until_healthy(LONG_S)
        shared.setenv("PREFECT_API_URL", server.api_url)
        yield


def train(home: Path, run: str, *options: str, spec: Path = SMOKE, **extra: str) -> subprocess.CompletedProcess[str]:
    """One run, to its end."""
    return ppoflow(home, "train", str(spec), "--run", run, *options, **extra)


def ppoflow(home: Path, *arguments: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(home, **extra),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def start(home: Path, run: str, *options: str, spec: Path = SMOKE, **extra: str) -> subprocess.Popen[str]:
    """A run under way, in a session of its own."""
    return subprocess.Popen(
        command("train", str(spec), "--run", run, *options),
        cwd=ROOT,
        env=environment(home, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def records(home: Path, run: str) -> list[dict[str, Any]]:
    """The committed records of a run, as they lie there."""
    return [json.loads(path.read_text()) for path in record_files(home, run)]


def record_files(home: Path, run: str) -> list[Path]:
    """The files of the committed records."""
    return sorted((home / "store" / "runs" / run / "iterations").glob("*.json"))


def artifact(record: dict[str, Any], kind: str) -> dict[str, Any]:
    """The reference of this kind among what an iteration made."""
    return next(ref for ref in record["artifacts"].values() if ref["kind"] == kind)


def digests(record: dict[str, Any]) -> dict[str, str]:
    """Of everything that an iteration worked on and made."""
    made = {"prepare_dataset": record["dataset"], **record["artifacts"]}
    return {stage: ref["digest"] for stage, ref in made.items()}


def policy_bytes(home: Path, record: dict[str, Any]) -> bytes:
    """The weights that a record's checkpoint holds."""
    key = artifact(record, "checkpoint")["uri"].rpartition("/")[2]
    return (home / "store" / "checkpoint" / key / "policy" / "model.safetensors").read_bytes()


def flip_a_bit(file: Path) -> None:
    """In the middle of a stored file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)


def flow_states(home: Path) -> Counter[str]:
    """How many flow runs are in which state, as Prefect's own database has them."""
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        return Counter(name for (name,) in database.execute("select state_name from flow_run"))


def wait_for(
    happened: Any,
    what: str,
    deadline_s: float = DEADLINE_S,
    run: subprocess.Popen[str] | None = None,
    every_s: float = 0.05,
) -> None:
    """Poll until `happened()` is true; a `run` that ends before it does is a failure with its output."""
    deadline = time.monotonic() + deadline_s
    while not happened():
        if run is not None and run.poll() is not None:
            raise AssertionError(f"the run ended with {run.returncode} before {what}: {run.communicate()[0]}")
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s} s"
        time.sleep(every_s)


def processes_of(home: Path) -> Iterator[psutil.Process]:
    """Every live process that was started for runs under `home`."""
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("PPOFLOW_HOME") == str(home)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if ours and runs(process.pid):
            yield process
