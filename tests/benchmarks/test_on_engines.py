"""The benchmarks of engines at tiny sizes: they run, agree with what they measure, and write what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import promised_tflops
from benchmarks.memory import FLOW, of_processes
from benchmarks.rollout import response_tokens, stop_tokens
from benchmarks.shapes import SHAPES

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]
NOT_ON_A_BARE_MACHINE = (
    "vllm",
    "prefect",
    "mlflow",
    "boto3",
    "ray",
    "pydantic_settings",
    "aiohttp",
    "matplotlib",
    "typer",
)


def figures_of(name: str, results: Path, *options: str, **environment: str) -> Any:
    """What a benchmark writes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--results", str(results), *options]
    seen = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=seen, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((results / f"{name}.json").read_text())
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["versions"]["torch"]
    assert not {"results", "home"} & {*document["settings"]}, "places of the machine"
    return document["figures"]


def test_the_gpu_benchmark_needs_few_packages(tmp_path: Path) -> None:
    """Also one that is installed is found first where it says no, by every rank."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in NOT_ON_A_BARE_MACHINE:
        (hidden / f"{name}.py").write_text(f"raise ImportError('{name} is not on a bare machine')\n")
    environment = {"PYTHONPATH": str(hidden), "CUDA_VISIBLE_DEVICES": ""}
    cases = figures_of("gpu", tmp_path, "--tiny", "--ranks", "2", **environment)
    assert [case["setting"] for case in cases] == ["weights in bfloat16", "products in bfloat16"]
    for case in cases:
        assert case["tokens"] == 40
        assert case["tokens_per_second"]["steps"] > 0
        assert all(seconds > 0 for seconds in case["seconds"].values())
        assert 0 < case["useful_flop_over_matmul_rate"]["steps"] < 1
        assert case["memory_mib"]["idle"] > 0
        assert case["machine"]["gpu"] is None


def test_memory_is_measured(tmp_path: Path) -> None:
    options = ("--no-run", "--shape", "tiny", "--settings", "0", "--vocabularies", "5000", "--rounds", "1")
    figures = figures_of("memory", tmp_path, *options)["tiny"]
    (found,) = figures["vocabulary of 5,000"]
    assert found["parameters"] > 5000 * SHAPES["tiny"].config["hidden_size"]
    assert set(found["memory_mib"]) == {"idle", "experience_above_idle", "update_above_idle"}
    assert found["memory_mib"]["idle"] > 0


def test_memory_counts_to_the_engine_that_a_process_is_of_or_is_below() -> None:
    held = "held = b'x' * (40 << 20); print(1, flush=True); input()"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    engine = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}, 'ppo_core.engines.rollout'])"
    command = [sys.executable, "-c", engine]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdout is not None
        assert flow.stdout.readline() == "1\n"
        found = of_processes(psutil.Process(flow.pid))
        flow.communicate("\n")
    assert found["rollout engine"] > 40 << 20 > found[FLOW] > 0
    assert set(found) == {"rollout engine", FLOW}


def test_the_update_is_measured(tmp_path: Path) -> None:
    options = ("--shapes", "tiny", "--settings", "1", "--rounds", "1", "--iterations", "1")
    (round_,) = figures_of("update", tmp_path, *options)["tiny"]["as the engine runs"]
    assert 0 < round_["useful_flop_over_matmul_rate"]["steps"] < 1


def test_experience_is_that_of_plain_passes(tmp_path: Path) -> None:
    """The benchmark itself compares the numbers of both sides in every round."""
    options = ("--shapes", "tiny", "--rounds", "2", "--rows", "3", "--trl", str(tmp_path / "none"))
    found = figures_of("experience", tmp_path, *options)["tiny"]
    assert {side: len(seconds) for side, seconds in found.items()} == {"compute_advantages": 2, "plain passes": 2}


def test_a_reward_model_says_what_a_plain_loop_says(tmp_path: Path) -> None:
    found = figures_of("reward_model", tmp_path, "--shape", "tiny", "--samples", "12", "--rounds", "1")
    assert found["over_plain"] > 0
    assert found["largest_difference"] < 1e-5
    assert len(found["seconds"]) == 5


def test_rollouts_are_measured_beside_generate(tmp_path: Path) -> None:
    options = ("--shapes", "demo", "--responses", "64", "--rounds", "1")
    found = figures_of("rollout", tmp_path, *options)["demo, float32"]
    lengths = {side: rounds[0]["tokens"] / 64 for side, rounds in found.items()}
    assert lengths.keys() == {"rollout engine", "generate"}
    for length in lengths.values():  # 16.6 of 44 are expected, and the mean of 64 is spread by 1.6
        assert 8 < length < 26


def test_stop_tokens_make_the_mean_length_of_a_shape() -> None:
    assert len(stop_tokens(SHAPES["27M"])) == 889  # 32,000 tokens over 36
    assert response_tokens([[5, 6, 7], [7, 5, 7], [5, 5, 5]], {7}) == 3 + 1 + 3


@pytest.mark.parametrize(
    ("name", "tflops"), [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("other", None), (None, None)]
)
def test_the_makers_figure_goes_by_the_name(name: str | None, tflops: float | None) -> None:
    assert promised_tflops(name) == tflops
