"""Over-optimisation, shown: a policy trained against a learned reward, with a price on KL and nearly without one.

    python -m benchmarks.overoptimisation [--home .ppoflow/overoptimisation]

Trains the reward model of `examples/helpful`, then `ppo.yaml` and `overoptimised.yaml` against it, each as its spec
says and with one CPU thread for each engine, so that the bits do not depend on the number of cores. The second is to be
ended by the guard on the hidden rule. Prints what both scores did, and writes
`benchmarks/results/overoptimisation.json`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.learning import curve

EXAMPLE = Path("examples/helpful")
SPECS = ("ppo", "overoptimised")
CURVES = {
    "learned": "score/learned",
    "gold": "score/gold",
    "KL": "kl/reference",
    "length": "rollout/response_length",
    "repetition": "response/repetition",
    "gold's change": "gold/change",
}
EVERY, ENGINE_THREADS = 5, 1


def main() -> int:
    """The exit status says whether the guard ended the one run and not the other."""
    parser = report.arguments(__doc__)
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/overoptimisation"))
    parser.set_defaults(engine_threads=ENGINE_THREADS)  # the file names it
    given = parser.parse_args()
    home = given.home.absolute()
    shutil.rmtree(home, ignore_errors=True)
    ppoflow(home, "reward-model", "reward_model", "--run", "learned", check=True)
    figures = {spec: trained(home, spec) for spec in SPECS}
    report.save("overoptimisation", given, figures)
    for spec, found in figures.items():
        show(spec, found)
    return 0 if [found["ended_by_guard"] for found in figures.values()] == [False, True] else 1


def trained(home: Path, spec: str) -> dict[str, Any]:
    """One run: its curves by iteration, and whether the guard on the hidden rule ended it."""
    learned = {"kind": "model", "path": str(home / "runs" / "learned" / "reward-model"), "name": "learned"}
    sources = json.dumps([learned, {"function": "generate.py:gold", "weight": 0}])
    done = ppoflow(home, "train", spec, "--run", spec, "--set", f"reward.sources={sources}")
    print(done.stdout[-2000:], file=sys.stderr)
    files = sorted((home / "store" / "runs" / spec / "iterations").glob("*.json"))
    records = [json.loads(file.read_text())["metrics"] for file in files]
    by_guard = done.returncode != 0 and "guards.max_gold_fall" in done.stdout
    return {"ended_by_guard": by_guard, **{name: curve(records, metric) for name, metric in CURVES.items()}}


def ppoflow(
    home: Path, command: str, spec: str, *arguments: str, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """A command on one of the example's specs."""
    environment = [f"PPOFLOW_HOME={home}", f"PPOFLOW_ENGINE_THREADS={ENGINE_THREADS}"]
    program = [sys.executable, "-m", "flows.cli", command, str(EXAMPLE / f"{spec}.yaml"), *arguments]
    return subprocess.run(
        ["env", *environment, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=check
    )


def show(spec: str, found: Mapping[str, Any]) -> None:
    """Every few iterations, and the last."""
    last = max(found["gold"])
    shown = [step for step in found["gold"] if step in (1, last) or step % EVERY == 0]
    rows = [[str(step), *(found[name].get(step, "") for name in CURVES)] for step in shown]
    ending = ", ended by the guard" if found["ended_by_guard"] else ""
    report.show(f"{spec}.yaml: {last} iterations{ending}", ("iteration", *CURVES), rows)


if __name__ == "__main__":
    sys.exit(main())
