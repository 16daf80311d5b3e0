"""Reports to a real MLflow server that is away at the start, in the middle and at the end: all of it arrives, once."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from flows.iteration import Rerun
from infra.mlflow.tracking import RunTracker
from tasks.report import report_end
from tasks.reports.loss_curve import LOSS_CURVE
from tasks.runs.iteration_record import IterationRecord
from tests.infra.mlflow.mlflow_points import rows
from tests.infra.mlflow.mlflow_server import Server, with_long_timeouts
from tests.tasks.toy_engines import LOSSES
from tests.tasks.toy_runs import ToyRun, stored_record
from tests.waiting import FOR_EVER_S, LONG_S

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.thorough]
MLFLOWS_OWN_S = 246.0
"""How long one refused call takes with MLflow's defaults."""
SHORT = ("evaluation.every=2", "guards.min_free_disk=0")


@dataclass(frozen=True)
class Outage:
    """Runs that have seen a server away; each is called by when that was."""

    server: Server
    runs: dict[str, ToyRun]
    complaint: str | None
    seconds_without: float

    def points(self, run: str) -> list[tuple[str, int, float, int]]:
        """What the server has."""
        return rows(self.server.folder, self.runs[run].tracker.run_id)

    def ask(self, question: str, run: str) -> list[tuple[str, ...]]:
        """Of the server's database."""
        with sqlite3.connect(self.server.folder / "mlflow.db") as database:
            return database.execute(question, (self.runs[run].tracker.run_id,)).fetchall()


def points_of(records: list[IterationRecord]) -> list[tuple[str, int, float, int]]:
    """All that these records measured."""
    return sorted((key, r.iteration, value, r.committed_at_ms) for r in records for key, value in r.metrics.items())


def of_iterations(points: list[tuple[str, int, float, int]]) -> list[tuple[str, int, float, int]]:
    """Those whose steps are iterations."""
    return [point for point in points if point[0] != LOSS_CURVE]


@pytest.fixture(scope="module")
def outage(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Iterator[Outage]:
    """The server is away, comes, goes, and comes back; all the while runs are trained."""
    home = tmp_path_factory.mktemp("outage")
    server = Server(home)
    runs = {name: ToyRun(home / "runs", SHORT, name) for name in ("start", "middle", "end", "never", "again")}

    def process(name: str, iterations: int, rerun: Rerun | None = None) -> None:
        tracker = RunTracker(server.uri, "outage", name, home / "artifacts", timeout_s=LONG_S, back_off_s=FOR_EVER_S)
        runs[name].tracker = tracker
        runs[name].train(f"iterations={iterations}", rerun=rerun)

    patch = pytest.MonkeyPatch()
    try:
        with_long_timeouts(patch)
        started = time.monotonic()
        process("start", 2)
        process("never", 2)
        seconds_without = time.monotonic() - started
        server.start()
        process("start", 3)
        process("middle", 1)
        process("end", 3)
        process("again", 3)
        runs["again"].engines.reward = "stricter"
        process("again", 3, Rerun(iteration=2, start="score"))
        server.signal(signal.SIGKILL)
        process("middle", 3)
        process("end", 3)
        complaint = report_end(runs["end"].context("iterations=3"))
        server.start()
        process("middle", 4)
        process("end", 3)
        for name in ("end", "never"):  # of this one nobody has told anything while it was trained
            assert report_end(runs[name].context("iterations=3")) is None
        yield Outage(server, runs, complaint, seconds_without)
    finally:
        patch.undo()
        server.signal(signal.SIGKILL)


@pytest.mark.parametrize(("run", "iterations"), [("start", 3), ("middle", 4), ("end", 3), ("never", 2)])
def test_every_point_of_every_record_is_there_once(run: str, iterations: int, outage: Outage) -> None:
    records = outage.runs[run].records()
    assert [record.iteration for record in records] == list(range(iterations + 1))
    assert of_iterations(outage.points(run)) == points_of(records)
    assert [point[1:3] for point in outage.points(run) if point[0] == LOSS_CURVE] == list(enumerate(LOSSES, start=1))


@pytest.mark.parametrize("run", ["start", "middle", "end", "never"])
def test_settings_and_lineage_and_samples_arrive_too(run: str, outage: Outage) -> None:
    settings = dict(outage.ask("select key, value from params where run_uuid = ?", run))
    assert settings["update.learning_rate"] == "0.0001"
    tags = dict(outage.ask("select key, value from tags where run_uuid = ?", run))
    first = outage.runs[run].records()[0]
    assert tags["ppoflow.reference_digest"] == first.checkpoint.digest
    evaluated = [r.iteration for r in outage.runs[run].records() if r.evaluation is not None]
    tables = [table["path"] for table in json.loads(tags["mlflow.loggedArtifacts"])]
    assert tags["mlflow.source.type"] == "LOCAL"
    assert f"ppoflow resume {run}" in tags["mlflow.note.content"]
    uses = outage.ask("select t.value from inputs i join input_tags t using (input_uuid) where destination_id = ?", run)
    assert sorted(uses) == [("evaluation",), ("training",)]
    assert sorted(tables) == [f"samples/iteration_{iteration:06d}.json" for iteration in evaluated]


def test_the_end_is_told_when_the_server_is_back(outage: Outage) -> None:
    assert outage.complaint
    assert outage.ask("select status from runs where run_uuid = ?", "end") == [("FINISHED",)]
    assert "MLflow did not take this report" in outage.runs["start"].said


def test_an_outage_costs_seconds_and_no_iteration(outage: Outage) -> None:
    assert outage.seconds_without < MLFLOWS_OWN_S
    assert outage.runs["start"].engines.count("update_policy") == 3


def test_after_a_rerun_the_new_values_are_there_beside_the_old_ones(outage: Outage) -> None:
    run = outage.runs["again"]
    files = sorted(run.folder.glob("leases/*/superseded/*.json"))
    old = [stored_record(file) for file in files]
    assert [record.iteration for record in old] == [2, 3]
    assert of_iterations(outage.points("again")) == points_of([*run.records(), *old])
