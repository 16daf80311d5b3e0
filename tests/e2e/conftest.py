"""One finished smoke run that the end-to-end tests look at and go on from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import DEADLINE_S, ROOT, SMOKE, artifact, environment, records, train
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


FACTS = "facts.json"


@dataclass(frozen=True)
class FinishedRun:
    """A run's home, its report, and what its process was like."""

    home: Path
    name: str
    report: dict[str, Any]
    heavy_imports: list[str]
    peak_mib: float
    output: str


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The smoke spec, trained from nothing through the public flow. Its store stays as it is; the rest only here.

    Tests that change or copy its Prefect or MLflow are in one group of tests/conftest.py.
    """
    home = once(tmp_path_factory, "smoke", train_smoke)
    facts = json.loads((home / FACTS).read_text())
    return FinishedRun(home, "first", facts["report"], facts["heavy"], facts["peak_mib"], "")


def train_smoke(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(SMOKE), "first"],
        cwd=ROOT,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (home / FACTS).write_text(done.stdout.splitlines()[-1])


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
