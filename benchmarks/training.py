"""How fast is the training engine? Its experience and update by shape, one setting beside the other.

    python -m benchmarks.training [--shapes demo 27M] [--rounds 3] [--iterations 3]

Each round runs every setting once, so that a busy machine is busy for all of them. Prints medians with the ratio to the
first setting, and writes `benchmarks/results/training.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.shapes import SHAPES
from infra.settings import Settings
from tasks.stages.engine_programs import training_environment

RESULTS = Path("benchmarks/results/training.json")


@dataclass(frozen=True)
class Setting:
    """Arguments of `benchmarks.training_jobs`, and environment."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


SETTINGS = [
    Setting("as the engine runs"),
    Setting("threads that spin while they wait", environment={"OMP_WAIT_POLICY": "active"}),
    Setting("threads that sleep while they wait", environment={"OMP_WAIT_POLICY": "passive"}),
    Setting("microbatches of 2048 tokens", ("--tokens", "2048")),
    Setting("microbatches of 1024 tokens", ("--tokens", "1024")),
    Setting("products in bfloat16", ("--compute-dtype", "bfloat16")),
    Setting("weights in bfloat16", ("--dtype", "bfloat16", "--zero-stage", "1")),
]


def main() -> None:
    """All shapes, all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["demo", "27M"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3)
    given = parser.parse_args()
    results = {shape: compare(shape, given.rounds, given.iterations) for shape in given.shapes}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for shape, found in results.items():
        show(shape, found)


def compare(shape: str, rounds: int, iterations: int) -> dict[str, list[dict[str, Any]]]:
    """Every setting once a round."""
    found: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in SETTINGS}
    for _ in range(rounds):
        for setting in SETTINGS:
            found[setting.name].append(run(shape, iterations, setting))
    return found


def run(shape: str, iterations: int, setting: Setting) -> dict[str, Any]:
    """One setting in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training_jobs", shape, "--iterations", str(iterations)]
    engine = training_environment(Settings(), num_ranks=1, deterministic=False)
    done = subprocess.run(
        [*command, *setting.arguments],
        env={**os.environ, **engine, **setting.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def show(shape: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Medians over the rounds; ratios above 1 are faster than the first setting."""
    table = Table(title=f"training engine, {shape}: {next(iter(found.values()))[0]['tokens']} response tokens")
    for column in ("setting", "experience s", "steps s", "update s", "faster", "of the matmul rate", "MiB above idle"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    first: float | None = None
    for name, rounds in found.items():
        seconds = {part: middle(rounds, "seconds", part) for part in ("experience", "steps", "update")}
        whole = seconds["experience"] + seconds["update"]
        first = first or whole
        share = middle(rounds, "useful_flop_over_matmul_rate", "steps")
        memory = middle(rounds, "memory_mib", "peak_above_idle")
        cells = [f"{value:.2f}" for value in seconds.values()]
        table.add_row(name, *cells, f"{first / whole:.2f}", f"{share:.2f}", f"{memory:.0f}")
    Console(width=140).print(table)


def middle(rounds: list[dict[str, Any]], group: str, name: str) -> float:
    """The median over the rounds."""
    return statistics.median(one[group][name] for one in rounds)


if __name__ == "__main__":
    main()
