"""A flow for a worker: trains a toy run in a home of its own; in its first process it dies in the second update."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from tasks.prefect.deployment_params import name_of_run, shown_name
from tests.tasks.toy_runs import ToyRun


def die() -> None:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


@flow(name="toy-training", flow_run_name=shown_name, persist_result=False)
def toy_training(spec: dict[str, str], home: str) -> list[int]:
    """The iterations that the run has in the end."""
    run = ToyRun(Path(home), ("iterations=3", "evaluation.every=1"), name_of_run(spec["name"]))
    if flow_run.run_count == 1:
        run.engines.before("update_policy", 2, die)
    return [record.iteration for record in run.train()]
