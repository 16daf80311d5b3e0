"""Where do the seconds go from the command to the first PPO iteration? By cause, as the run itself tells them.

    python -m benchmarks.startup [--spec examples/arithmetic/demo.yaml] [--rounds 3] [--home .ppoflow/benchmarks]

Each round starts a run in a store of its own, where everything is to be made, and then one that finds dataset and
supervised start there and samples at another temperature. Prints the medians of each step, and writes
`benchmarks/results/startup.json`.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import report

NEW, AGAIN = "nothing in the store", "dataset and SFT in the store"
STEP = re.compile(r"^ *[0-9]+\.[0-9] s  (?P<what>.+)$")
RECORD = re.compile(r"^ *(?P<iteration>[01])/[0-9]+ ")
IMPORTS, FIRST = "Python and the command's imports", "iteration 1"


def main() -> None:
    """Both cases, round by round."""
    parser = report.arguments(__doc__)
    parser.add_argument("--spec", type=Path, default=Path("examples/arithmetic/demo.yaml"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {NEW: [], AGAIN: []}
    home = given.home.absolute() / "startup"
    for _ in range(given.rounds):
        shutil.rmtree(home, ignore_errors=True)
        found[NEW].append(causes(lines_of(given.spec, home, "new")))
        found[AGAIN].append(causes(lines_of(given.spec, home, "again", "rollout.temperature=0.99")))
        report.save("startup", given, found)
    shutil.rmtree(home, ignore_errors=True)
    for case, rounds in found.items():
        medians = {what: statistics.median(one.get(what, 0.0) for one in rounds) for what in rounds[0]}
        rows = [*medians.items(), ("together", statistics.median(sum(one.values()) for one in rounds))]
        report.show(f"{given.spec}: {case}", ("from the command to the end of iteration 1", "seconds"), rows)


def lines_of(spec: Path, home: Path, run: str, *changes: str) -> list[tuple[float, str]]:
    """What a run of two iterations says, each line with the seconds since the command."""
    settings = [part for change in ("iterations=2", "evaluation.every=1000", *changes) for part in ("--set", change)]
    command = [sys.executable, "-m", "flows.cli", "train", str(spec), "--run", run, *settings]
    environment = {
        **os.environ,
        "PPOFLOW_HOME": str(home),
        "PPOFLOW_STORE": str(home / "store"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "160",
    }
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [(time.perf_counter() - began, line.rstrip()) for line in process.stdout]
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return lines


def causes(lines: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Seconds from each step that a run announces to the next one; the last step ends with the row of iteration 1.

    Raises ValueError where there is no such row.
    """
    found, what, since = dict[str, float](), IMPORTS, 0.0
    for at, line in lines:
        step, record = STEP.match(line), RECORD.match(line)
        if line.startswith("starting: "):
            following = "checks before the first step"
        elif step is not None:
            following = step["what"]
        elif record is not None:
            following = FIRST
        else:
            continue
        found[what] = found.get(what, 0.0) + at - since
        what, since = following, at
        if record is not None and record["iteration"] == "1":
            return found
    raise ValueError("the run told of no iteration 1")


if __name__ == "__main__":
    main()
