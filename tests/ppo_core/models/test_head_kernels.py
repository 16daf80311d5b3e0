"""The GPU's kernels of the output layer, by Triton's interpreter; on a GPU see engines/test_devices.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NEAR = {"torch.float32": 2e-5, "torch.bfloat16": 0.02}  # the gradient is rounded to the type of the logits


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the program prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ppo_core.models.head_kernels_program"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.thorough)])
def test_they_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    """Which the interpreter does not show: what it runs as Python need not be what the compiler takes."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    program = f"from tests.ppo_core.models.compiled_kernels import compile_kernels as c; c({capability})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.rglob("*.cubin")} == {"_statistics", "_gradient"}


def test_they_compute_what_a_cpu_computes(said: dict[str, Any]) -> None:
    assert len(said["cases"]) == 24
    for case in said["cases"]:
        *statistics, gradient = case["differences"]
        assert all(difference < 2e-5 for difference in statistics), case  # of which none is a NaN
        assert gradient < NEAR[case["dtype"]], case


def test_what_is_not_finite_is_seen(said: dict[str, Any]) -> None:
    assert said["finite"] == [True, False, False, True]
