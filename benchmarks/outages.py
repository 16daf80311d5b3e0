"""Does a run on the stack outlive its servers? S3 away for minutes and PostgreSQL restarted, in the middle of a run.

    make stack && python -m benchmarks.outages [--s3-seconds 300] [--postgres-seconds 5]

Trains examples/arithmetic/smoke.yaml twice on the servers of `make stack`, each time into an empty part of its bucket:
once undisturbed; once S3 is stopped after iteration 1, and PostgreSQL, which holds Prefect's and MLflow's databases,
after iteration 2. Compares the digest of every stage of every iteration. Prints a table, and writes `outages.json`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, save, show
from infra.backend import open_records
from infra.deploy.stack.plan import open_site
from infra.deploy.stack.site import SERVERS
from infra.deploy.stack.supervisor import Supervisor
from infra.settings import StackSettings

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "examples" / "arithmetic" / "smoke.yaml"
RUN = "outages"
DEADLINE_S = 1800.0
POLL_S = 0.2


@dataclass
class StackRun:
    """A run of the smoke spec on the stack, as one command in one process."""

    home: Path
    store: str

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        self.log = self.home / "run.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "train", str(SPEC), "--run", RUN],
                cwd=ROOT,
                env={**os.environ, "PPOFLOW_HOME": str(self.home), "PPOFLOW_STORE": self.store, "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, iteration: int) -> None:
        """Until it is committed."""
        self._poll(lambda: (last := open_records(self.store, RUN).last()) is not None and last >= iteration)

    def finish(self) -> None:
        """Until the command ends."""
        self._poll(lambda: self.process.poll() is not None)

    def digests(self) -> list[dict[str, str]]:
        """Of what every stage of every iteration made."""
        made = [record["artifacts"] for record in open_records(self.store, RUN).all()]
        return [{stage: ref["digest"] for stage, ref in stages.items()} for stages in made]

    def warnings(self) -> list[str]:
        """What the console said of servers that did not answer."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("! ")]

    def _poll(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            if self.process.poll() not in (None, 0):
                raise RuntimeError(f"the run ended with exit status {self.process.returncode}; see {self.log}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run is not as far after {DEADLINE_S:g} s; see {self.log}")
            time.sleep(POLL_S)


def main() -> int:
    """Both runs; the exit status says whether all digests are the same."""
    parser = arguments(__doc__)
    parser.add_argument("--s3-seconds", type=float, default=300.0, help="how long S3 is away")
    parser.add_argument("--postgres-seconds", type=float, default=5.0, help="how long PostgreSQL is away")
    parser.add_argument("--home", type=Path, default=Path(".ppoflow/outages"))
    given = parser.parse_args()
    supervisor = Supervisor(open_site(StackSettings(), frozenset(SERVERS)))
    use_stack()
    name = f"outages-{uuid.uuid4().hex[:8]}"
    store, home = f"{os.environ['PPOFLOW_STORE']}/{name}", given.home.absolute() / name
    began = time.monotonic()
    whole = StackRun(home / "undisturbed", f"{store}/undisturbed")
    whole.finish()
    undisturbed_s = time.monotonic() - began
    began = time.monotonic()
    struck = StackRun(home / "struck", f"{store}/struck")
    for iteration, server, seconds in ((1, "s3", given.s3_seconds), (2, "postgres", given.postgres_seconds)):
        struck.wait_for(iteration)
        take_away(supervisor, server, seconds)
    struck.finish()
    same = struck.digests() == whole.digests()
    figures = {
        "same": same,
        "iterations": len(struck.digests()) - 1,
        "undisturbed_s": undisturbed_s,
        "struck_s": time.monotonic() - began,
        "said": struck.warnings(),
    }
    save("outages", given, figures)
    report(given, figures)
    return 0 if same else 1


def use_stack() -> None:
    """Take over what `python -m infra.deploy.stack env` prints, as a user's shell does."""
    command = [sys.executable, "-m", "infra.deploy.stack", "env"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for verb, *words in map(shlex.split, printed.splitlines()):
        for word in words:
            name, _, value = word.partition("=")
            os.environ.pop(name, None)
            if verb == "export":
                os.environ[name] = value


def take_away(supervisor: Supervisor, server: str, seconds: float) -> None:
    """Stop a server of the stack, and start it again."""
    print(f"{server} is stopped for {seconds:g} s", flush=True)
    supervisor.stop(server)
    time.sleep(seconds)
    supervisor.start(server)


def report(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """The table."""
    rows: list[list[str | float]] = [
        ["undisturbed", figures["undisturbed_s"], "-"],
        ["S3 and PostgreSQL away", figures["struck_s"], "the same" if figures["same"] else "DIFFERENT"],
    ]
    away = f"S3 away for {given.s3_seconds:g} s, PostgreSQL for {given.postgres_seconds:g} s"
    show(f"{away}, in a run of {figures['iterations']} iterations", ["run", "seconds", "digests"], rows)
    for line in figures["said"]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
