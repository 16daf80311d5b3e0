"""How near is the training engine to what the machine can do? Its update and experience, setting beside setting.

    python -m benchmarks.update [--shapes demo 27M] [--rounds 3] [--iterations 3]

Useful FLOP, of real tokens alone, over those of a large matrix product in the same precision, and the highest memory of
an update above that of the idle engine (which holds networks, optimizer and reference). Each round runs every setting
once, so that a busy machine is busy for all of them. Prints medians with the ratio to the first setting, and writes
`benchmarks/results/update.json`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from benchmarks.shapes import SHAPES
from infra.settings import Settings
from tasks.stages.engine_programs import training_environment


@dataclass(frozen=True)
class Setting:
    """Arguments of `benchmarks.training_jobs`, and environment. `threads`: of each rank; none: it chooses."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    threads: int | None = None


SETTINGS = [
    Setting("as the engine runs"),
    Setting("products in bfloat16", ("--compute-dtype", "bfloat16")),
    Setting("weights in bfloat16", ("--dtype", "bfloat16", "--zero-stage", "1")),
    Setting("threads that spin while they wait", environment={"OMP_WAIT_POLICY": "active"}),
    Setting("threads that sleep while they wait", environment={"OMP_WAIT_POLICY": "passive"}),
    Setting("microbatches of 2048 tokens", ("--tokens", "2048")),
    Setting("microbatches of 1024 tokens", ("--tokens", "1024")),
]


def main() -> None:
    """All shapes, all settings."""
    parser = report.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["demo", "27M"])
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="so many of them, from the first on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3)
    given = parser.parse_args()
    settings, figures = SETTINGS[: given.settings], dict[str, Any]()
    for shape in given.shapes:
        figures[shape] = compare(shape, settings, given.rounds, given.iterations)
        show(shape, figures[shape])
        report.save("update", given, figures)


def compare(shape: str, settings: list[Setting], rounds: int, iterations: int) -> dict[str, list[dict[str, Any]]]:
    """Every setting once a round."""
    found: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            found[setting.name].append(run(shape, iterations, setting))
    return found


def run(shape: str, iterations: int, setting: Setting) -> dict[str, Any]:
    """One setting in a process of its own, with the environment of a run's training engine."""
    command = [sys.executable, "-m", "benchmarks.training_jobs", shape, "--iterations", str(iterations)]
    settings = Settings().model_copy(update={"engine_threads": setting.threads})
    engine = training_environment(settings, num_ranks=setting.ranks)
    done = subprocess.run(
        [*command, "--ranks", str(setting.ranks), *setting.arguments],
        env={**os.environ, **engine, **setting.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def show(shape: str, found: Mapping[str, list[dict[str, Any]]]) -> None:
    """Medians over the rounds; ratios above 1 are faster than the first setting."""
    tokens = next(iter(found.values()))[0]["tokens"]
    columns = ("setting", "experience s", "steps s", "update s", "faster", "of the matmul rate", "GFLOP/s", "MiB above")
    rows, first = list[list[str | float]](), 0.0
    for name, rounds in found.items():
        seconds = [middle(rounds, "seconds", part) for part in ("experience", "steps", "update")]
        whole = seconds[0] + seconds[2]
        first = first or whole
        share, speed = (
            middle(rounds, group, "steps") for group in ("useful_flop_over_matmul_rate", "useful_flop_per_second")
        )
        memory = f"{middle(rounds, 'memory_mib', 'update_above_idle'):.0f}"
        rows.append([name, *seconds, first / whole, share, f"{speed / 1e9:.0f}", memory])
    report.show(f"training engine, {shape}: {tokens} response tokens", columns, rows)


def middle(rounds: list[dict[str, Any]], group: str, name: str) -> float:
    """The median over the rounds."""
    return statistics.median(one[group][name] for one in rounds)


if __name__ == "__main__":
    main()
