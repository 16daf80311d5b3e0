"""Somebody deletes a run's MLflow run while it is trained: another one gets all of it, from its beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.mlflow.client import open_client
from infra.mlflow.tracking import RunTracker
from tasks.report import report, report_end
from tasks.runs.iteration_record import IterationRecord
from tasks.stages.context import RunContext
from tests.infra.mlflow.mlflow_points import rows
from tests.tasks.toy_runs import ToyRun, ended_well
from tests.waiting import LONG_S

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> ToyRun:
    """Two iterations that MLflow has."""
    home = tmp_path_factory.mktemp("deleted")
    tracker = RunTracker(f"sqlite:///{home}/mlflow.db", "deleted", "toy", home / "artifacts", timeout_s=LONG_S)
    run = ToyRun(home, ("evaluation.every=1", "guards.min_free_disk=0", "iterations=2"), tracker=tracker)
    run.train()
    return run


@pytest.mark.parametrize("told", [report, lambda context, _: report_end(context)], ids=["meanwhile", "at the end"])
def test_the_next_report_has_all_iterations_and_what_the_run_is(
    told: Callable[[RunContext, IterationRecord], str | None], trained: ToyRun, tmp_path: Path
) -> None:
    records, tracker = trained.records(), trained.tracker
    with ended_well(trained.context()) as context:
        assert report(context, records[1]) is None
        deleted = str(tracker.run_id)
        open_client(tracker.uri).delete_run(deleted)
        context.reported.discard(2)  # as if it was committed just now
        assert told(context, records[2]) is None
    assert tracker.run_id != deleted
    score = [(step, value) for key, step, value, _ in rows(trained.home, tracker.run_id) if key == "score/mean"]
    assert score == [(r.iteration, r.metrics["score/mean"]) for r in records if "score/mean" in r.metrics]
    data = open_client(tracker.uri).get_run(str(tracker.run_id)).data
    assert data.params["iterations"] == "2"
    assert data.tags["ppoflow.reference_digest"] == records[0].checkpoint.digest
