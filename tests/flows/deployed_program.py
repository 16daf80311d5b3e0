"""Flows for a worker: one trains a toy run and dies in its first process, one does not answer when it is cancelled."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from tasks.prefect.deployment_params import name_of_run, shown_name
from tests.tasks.toy_runs import ToyRun
from tests.waiting import FOR_EVER_S


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


@flow(name="deaf", persist_result=False)
def deaf(spec: dict[str, str], home: str) -> None:
    """Ends by SIGTERM before it has answered its runner, like a process that is too busy to do so within a second."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    Path(home).mkdir()
    time.sleep(FOR_EVER_S)
