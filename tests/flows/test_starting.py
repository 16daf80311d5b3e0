"""The first lines of a command, and how long a stage takes yet."""

from __future__ import annotations

import doctest
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flows import pace
from flows.console import RunConsole
from flows.pace import Pace
from infra.engines.protocol import EngineProgress
from tests.flows.samples import record

ROOT = Path(__file__).parents[2]
FIRST_LINE = """
import os
import sys

class Screen:
    def write(self, text):
        heavy = {"prefect", "mlflow", "torch", "boto3", "botocore", "ray", "transformers", "pyarrow"}
        print(text.strip(), sorted(heavy & set(sys.modules)), file=sys.stderr, flush=True)
        os._exit(7)

    def flush(self):
        pass

sys.stdout = Screen()
from flows.cli import app
app(["train", "examples/arithmetic/smoke.yaml", "--run", "first"])
"""
REFUSED = """
import sys
from flows.cli import app
try:
    app(["train", "examples/arithmetic/smoke.yaml", "--set", "iteration=4"])
except SystemExit as end:
    heavy = {"prefect", "mlflow", "torch", "boto3", "botocore", "ray", "transformers", "pyarrow"}
    print(end.code, sorted(heavy & set(sys.modules)))
"""


def test_the_first_line_comes_before_anything_that_takes_time_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == "starting: run first from examples/arithmetic/smoke.yaml []\n"
    assert done.returncode == 7


def test_a_spec_is_refused_before_anything_that_takes_time_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines()[-1] == "2 []", done.stdout + done.stderr


def test_the_examples_hold() -> None:
    assert doctest.testmod(pace).failed == 0


def test_a_stage_tells_how_long_it_takes_by_its_own_count() -> None:
    now = 0.0
    clock = Pace(lambda: now)
    told = []
    for seconds, count in ((0, ("sft", 0, 0)), (40, ("sft", 1, 100)), (10, ("sft", 21, 100)), (5, ("sft", 31, 100))):
        now += seconds
        clock.take(*count)
        told.append(clock.to_go())
    # The engine's start (40 s) does not count: 20 steps in 10 s, then 30 in 15.
    assert told == ["", "", "0.5 s each, about 40 s of this stage to go", "0.5 s each, about 34 s of this stage to go"]
    assert clock.take("update", 1, 8)
    assert clock.to_go() == ""
    assert not clock.take("update", 2, 8)


@pytest.mark.parametrize("terminal", [False, True])
def test_before_the_first_record_each_stage_is_told_as_it_begins(terminal: bool) -> None:
    buffer = io.StringIO()
    console = RunConsole("r", 4, Console(file=buffer, force_terminal=terminal, width=120, height=40))
    with console:
        console.step("engines are starting")
        console.progress(EngineProgress("training", "finetune_policy", 0, 0, ""))
        console.progress(EngineProgress("training", "finetune_policy", 1, 8, "loss 5.0"))
        if terminal:
            console.console.print(console.render())
    lines = buffer.getvalue().splitlines()
    assert " s  engines are starting" in lines[0]
    assert any(" s  finetune_policy" in line for line in lines[1:])
    if not terminal:
        assert len(lines) == 2
        console.iteration(record(0, {}))
        console.progress(EngineProgress("rollout", "generate_rollouts", 0, 0, ""))
        assert "generate_rollouts" not in buffer.getvalue()
