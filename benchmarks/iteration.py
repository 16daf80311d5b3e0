"""Whole iterations of the example, beside TRL's PPOTrainer: same policy, prompts, lengths, epochs and minibatches.

    python -m benchmarks.iteration [--rounds 3] [--iterations 6] [--home .ppoflow/benchmarks]

TRL comes into an environment of its own (`--trl`), made at the first time. Its trainer starts from the policy that the
example's supervised start makes, as the runs here do. Each round runs every side once, so that a busy machine is busy
for all. Prints medians over iterations from the third on, and writes `benchmarks/results/iteration.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import parquet
from rich.console import Console
from rich.table import Table

from benchmarks.training_jobs import machine

SPEC = Path("examples/arithmetic/demo.yaml")
RESULTS = Path("benchmarks/results/iteration.json")
TRL = "trl==1.12.0"  # the last version with a PPOTrainer
PARTS = ("rollout", "experience", "update", "iteration")
STAGES = {
    "rollout": ("seconds/generate_rollouts",),
    "experience": ("seconds/score_rollouts", "seconds/compute_advantages"),
    "update": ("seconds/update_policy",),
    "iteration": ("seconds/iteration",),
}
OURS = {
    "ppoflow": (),
    "ppoflow, products in bfloat16": ("training.compute_dtype=bfloat16",),
}
PEERS: Mapping[str, tuple[str, ...]] = {f"{TRL}": (), f"{TRL}, bf16": ("--bf16",)}
WARM_UP = 2


def main() -> None:
    """All sides, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    parser.add_argument("--trl", type=Path, default=Path(".ppoflow/trl"), help="the folder of TRL's environment")
    given = parser.parse_args()
    home, python = given.home.absolute(), environment(given.trl.absolute())
    policy, prompts = start(home)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*PEERS, *OURS)}
    for _ in range(given.rounds):
        for name, options in PEERS.items():
            found[name] += peer(python, policy, prompts, given.iterations, options)
        for name, settings in OURS.items():
            found[name] += ours(home, policy, given.iterations, settings)
    medians = {
        name: {part: statistics.median(one[part] for one in iterations) for part in PARTS}
        for name, iterations in found.items()
    }
    document = {"spec": str(SPEC), "machine": machine(), "medians": medians, "iterations": found}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    show(medians)


def environment(folder: Path) -> Path:
    """The Python of TRL's environment, which is made where there is none."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        torch = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__version__.partition('+')[0])"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={torch}", TRL], check=True)
    return python


def train(home: Path, run: str, *settings: str) -> list[dict[str, Any]]:
    """A run of the example, and its records."""
    command = [sys.executable, "-m", "flows.cli", "train", str(SPEC), "--run", run]
    changes = [part for setting in settings for part in ("--set", setting)]
    subprocess.run(["env", f"PPOFLOW_HOME={home}", *command, *changes], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(path.read_text()) for path in sorted((home / f"store/runs/{run}/iterations").glob("*.json"))]


def start(home: Path) -> tuple[Path, Path]:
    """The folder of the policy after the supervised start, and a file of the prompts' token ids."""
    first = train(home, f"start-{int(time.time())}", "iterations=1", "evaluation.every=1000")[0]
    places = [Path(reference["uri"].removeprefix("file://")) for reference in (first["reference"], first["dataset"])]
    prompts = home / "prompts.json"
    table = parquet.read_table(places[1] / "train.parquet", columns=["prompt_token_ids"])
    prompts.write_text(json.dumps(table["prompt_token_ids"].to_pylist()))
    return places[0] / "policy", prompts


def ours(home: Path, policy: Path, iterations: int, settings: tuple[str, ...]) -> list[dict[str, float]]:
    """Seconds of each iteration after the warm-up, by stage; those outside the engines are in `iteration`."""
    start_there = ("sft=null", f"model={{path: {policy}}}", "evaluation.every=1000", "update.learning_rate=1e-5")
    name = f"run-{time.time_ns()}"
    records = train(home, name, *start_there, f"iterations={iterations}", f"seed={time.time_ns() % 10**6}", *settings)
    metrics = [record["metrics"] for record in records[1 + WARM_UP :]]
    return [{part: sum(one[name] for name in names) for part, names in STAGES.items()} for one in metrics]


def peer(
    python: Path, policy: Path, prompts: Path, iterations: int, options: tuple[str, ...]
) -> list[dict[str, float]]:
    """The same of TRL."""
    program = Path(__file__).with_name("trl_iterations.py")
    done = subprocess.run(
        [python, program, policy, prompts, "--iterations", str(iterations), *options],
        cwd=prompts.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines[WARM_UP:]


def show(medians: Mapping[str, Mapping[str, float]]) -> None:
    """Ratios above 1 are faster than the faster of TRL's two."""
    best = min(medians[name]["iteration"] for name in PEERS)
    table = Table(title="seconds of an iteration of the example, medians")
    for column in ("", *PARTS, "faster than TRL"):
        table.add_column(column, justify="right" if column else "left")
    for name, parts in medians.items():
        table.add_row(name, *(f"{parts[part]:.2f}" for part in PARTS), f"{best / parts['iteration']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
