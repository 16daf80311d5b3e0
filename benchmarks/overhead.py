"""How long does an iteration take outside of the engines: with the store in a folder, and on S3?

    python -m benchmarks.overhead [--spec examples/arithmetic/smoke.yaml] [--iterations 10] [--rounds 2] [--s3 moto]

`--s3 moto` starts the server of the tests, on this machine; `--s3 s3://bucket/prefix` takes yours, `--s3 none` none.
Runs take turns. Prints medians over the iterations from the second on, as the runs' own records have them, and writes
`benchmarks/results/overhead.json`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from secrets import token_hex
from typing import Any

from benchmarks import report
from benchmarks.s3_throughput import moto_server
from infra.backend import open_records

PARTS = ("outside_engines", "outside_store", "outside_hops", "outside_tracking", "outside_prefect_and_rest")
WARM_UP = 2  # the first two records: the start, and an iteration in which engines start


def main() -> None:
    """Both stores in turns."""
    parser = report.arguments(__doc__)
    parser.add_argument("--spec", type=Path, default=Path("examples/arithmetic/smoke.yaml"))
    parser.add_argument("--iterations", type=report.at_least(WARM_UP + 1), default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--s3", default="moto", help="moto, none, or s3://bucket/prefix")
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/benchmarks"))
    given = parser.parse_args()
    home, found = given.home.absolute() / "overhead", dict[str, list[dict[str, float]]]()
    with moto_server() if given.s3 == "moto" else nullcontext(given.s3) as bucket:
        for number in range(given.rounds):
            stores = {"a folder": str(home / "store")} | (
                {} if bucket == "none" else {"S3": f"{bucket}/{token_hex(4)}-{number}"}
            )
            for name, store in stores.items():
                shutil.rmtree(home, ignore_errors=True)
                found.setdefault(name, []).extend(measured(given.spec, given.iterations, home, store))
                report.save("overhead", given, {"s3": given.s3, "medians": medians(found), "iterations": found})
    shutil.rmtree(home, ignore_errors=True)
    rows = [[name, *of.values()] for name, of in medians(found).items()]
    columns = ("store in", "iteration", *(part.removeprefix("outside_").replace("_", " ") for part in PARTS))
    report.show(f"{given.spec}: seconds of an iteration, and outside of the engines", columns, rows)


def measured(spec: Path, iterations: int, home: Path, store: str) -> list[dict[str, float]]:
    """A run's metrics, record by record."""
    settings = [part for change in (f"iterations={iterations}", "evaluation.every=1000") for part in ("--set", change)]
    command = [sys.executable, "-m", "flows.cli", "train", str(spec), "--run", "overhead", *settings]
    environment = {**os.environ, "PPOFLOW_HOME": str(home), "PPOFLOW_STORE": store}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return after_warm_up(open_records(store, "overhead").all())


def after_warm_up(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Seconds of the iterations that count; the last is evaluated, and left out."""
    kept = [record["metrics"] for record in records[WARM_UP:-1]]
    return [{part: metrics.get(f"seconds/{part}", 0.0) for part in ("iteration", *PARTS)} for metrics in kept]


def medians(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each store's iterations."""
    return {
        name: {part: statistics.median(one[part] for one in each) for part in ("iteration", *PARTS)}
        for name, each in found.items()
    }


if __name__ == "__main__":
    main()
