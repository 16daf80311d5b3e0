"""One finished smoke run that the end-to-end tests look at and go on from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import DEADLINE_S, ROOT, SMOKE, artifact, environment, records, train
from tests.e2e.sockets import ELSEWHERE, OpenSocket, SocketWatch
from tests.once import once

PROGRAM = """
import json, re, sys
from pathlib import Path
from ppo_core.spec import RunSpec
from flows.ppo import ppo_training
report = ppo_training(RunSpec.from_yaml(sys.argv[1]), sys.argv[2])
heavy = sorted({"torch", "transformers", "vllm", "deepspeed"} & set(sys.modules))
# Not ru_maxrss: that one begins with the size of the process that started this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
print(json.dumps({"report": report.model_dump(mode="json"), "heavy": heavy, "peak_mib": peak}))
"""


FACTS, SOCKETS = "facts.json", "sockets.json"


@dataclass(frozen=True)
class FinishedRun:
    """A run's home, its report, and what its process was like."""

    home: Path
    name: str
    report: dict[str, Any]
    heavy_imports: list[str]
    peak_mib: float
    output: str
    sockets: frozenset[OpenSocket] = frozenset()


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The smoke spec, trained from nothing through the public flow. Its store stays as it is; the rest only here.

    Tests that change or copy its Prefect or MLflow are in one group of tests/conftest.py.
    """
    home = once(tmp_path_factory, "smoke", train_smoke)
    facts = json.loads((home / FACTS).read_text())
    sockets = frozenset(OpenSocket(**one) for one in json.loads((home / SOCKETS).read_text()))
    return FinishedRun(home, "first", facts["report"], facts["heavy"], facts["peak_mib"], "", sockets)


def train_smoke(home: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(SMOKE), "first"],
        cwd=ROOT,
        env=environment(home, **ELSEWHERE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        watch = SocketWatch(run)
        try:
            output, complaint = run.communicate(timeout=DEADLINE_S)
        finally:
            run.kill()
            seen = watch.stop()
    assert run.returncode == 0, output + complaint
    (home / SOCKETS).write_text(json.dumps([asdict(one) for one in seen]))
    (home / FACTS).write_text(output.splitlines()[-1])


@pytest.fixture(scope="session")
def longer(smoke: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The smoke run, gone on with to eight iterations: never interrupted, but started a second time."""

    def train_on(home: Path) -> None:
        shutil.copytree(smoke.home / "store", home / "store")
        rollouts = artifact(records(home, "first")[3], "rollouts")["uri"].rpartition("/")[2]
        damaged = home / "store" / "rollouts" / rollouts / "rollouts.parquet"
        damaged.chmod(0o644)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"X")  # of an iteration that is done: nobody reads it again
        done = train(home, "first", "--set", "iterations=8")
        assert done.returncode == 0, done.stdout + done.stderr
        (home / FACTS).write_text(done.stdout)

    home = once(tmp_path_factory, "longer", train_on)
    return FinishedRun(home, "first", {}, [], 0.0, (home / FACTS).read_text())
