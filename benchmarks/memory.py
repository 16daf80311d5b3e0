"""How much memory a run takes: each of its processes, and the training engine setting by setting.

    python -m benchmarks.memory [--spec examples/arithmetic/demo.yaml] [--shape 27M] [--vocabularies 8000 32000 128000]

The first table is of a whole run of two iterations: the highest memory of each process, with what it shares counted in
parts (PSS), five looks a second. The second is of the training engine: what it holds between jobs (networks, reference,
optimizer), and what experience and update take above that. On a GPU the second counts torch's memory there. Prints
both, and writes `benchmarks/results/memory.json`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.shapes import SHAPES
from benchmarks.update import Setting, run

FLOW = "the flow and its Prefect server"
LOOK_S = 0.2
MIB = 2**20
SETTINGS = [
    Setting("as the engine runs"),
    Setting("one thread", ("--threads", "1")),
    Setting("products in bfloat16", ("--compute-dtype", "bfloat16")),
    Setting("weights in bfloat16", ("--dtype", "bfloat16", "--zero-stage", "1")),
    Setting("microbatches of 1024 tokens", ("--tokens", "1024")),
    Setting("microbatches of 2048 tokens", ("--tokens", "2048")),
]


def main() -> None:
    """Both tables."""
    parser = report.arguments(__doc__)
    parser.add_argument("--spec", type=Path, default=Path("examples/arithmetic/demo.yaml"))
    parser.add_argument("--run", action=argparse.BooleanOptionalAction, default=True, help="whether to measure a run")
    parser.add_argument("--shape", choices=SHAPES, default="27M")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="so many of them, from the first on")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[8_000, 32_000, 128_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    given = parser.parse_args()
    figures = dict[str, Any]()
    if given.run:
        figures["run"] = of_run(given.spec, given.home.absolute() / "memory")
        rows = [(name, f"{mib:.0f}") for name, mib in figures["run"].items()]
        report.show(f"a run of {given.spec}: the highest of each", ("process", "MiB"), rows)
    sizes = [Setting(f"vocabulary of {size:,}", ("--vocabulary", str(size))) for size in given.vocabularies]
    settings = [*SETTINGS[: given.settings], *sizes]
    found: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
    for _ in range(given.rounds):
        for setting in settings:
            found[setting.name].append(run(given.shape, given.iterations, setting))
        report.save("memory", given, {**figures, given.shape: found})
    columns = ("setting", "parameters, millions", "held between jobs", "experience above", "update above")
    report.show(f"training engine, {given.shape}: MiB", columns, [row(name, rounds) for name, rounds in found.items()])


def row(name: str, rounds: Iterable[Mapping[str, Any]]) -> list[str]:
    """The medians of one setting."""
    memory = [one["memory_mib"] for one in rounds]
    kinds = ("idle", "experience_above_idle", "update_above_idle")
    cells = [statistics.median(one[kind] for one in memory) for kind in kinds]
    return [name, f"{next(iter(rounds))['parameters'] / 1e6:.1f}", *(f"{cell:.0f}" for cell in cells)]


def of_run(spec: Path, home: Path) -> dict[str, float]:
    """The highest MiB of each process of a run in a store of its own, with its children; and of all together."""
    shutil.rmtree(home, ignore_errors=True)
    changes = [part for change in ("iterations=2", "evaluation.every=2") for part in ("--set", change)]
    command = report.ppoflow(home, "train", str(spec), "--run", "memory", *changes)
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    highest: Counter[str] = Counter()
    while process.poll() is None:
        now = of_processes(process)
        highest |= now + Counter({"all of them together": now.total()})
        time.sleep(LOOK_S)
    shutil.rmtree(home, ignore_errors=True)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {name: size / MIB for name, size in sorted(highest.items(), key=lambda one: one[1])}


def of_processes(root: psutil.Process) -> Counter[str]:
    """Bytes by whom they belong to: a process counts to the engine that it is of, or is below."""
    found: Counter[str] = Counter()

    def add(process: psutil.Process, whose: str) -> None:
        try:
            words, below = process.cmdline(), process.children()
            size = process.memory_full_info().pss if sys.platform == "linux" else process.memory_info().rss
        except psutil.Error:  # it has ended meanwhile
            return
        engine = next((word for word in words if word.startswith("ppo_core.engines.")), None)
        whose = whose if engine is None else f"{engine.rpartition('.')[2]} engine"
        found[whose] += size
        for child in below:
            add(child, whose)

    add(root, FLOW)
    return found


if __name__ == "__main__":
    main()
