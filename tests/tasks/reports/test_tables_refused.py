"""MLflow's server takes points, but cannot store files: a full bucket, or a folder that is not this machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.mlflow.tracking import RunTracker
from tasks.report import report, report_end
from tests.infra.mlflow.mlflow_points import rows
from tests.tasks.toy_runs import ToyRun, ended_well
from tests.waiting import LONG_S


@pytest.mark.usefixtures("prefect_server")
def test_curves_do_not_wait_for_tables_and_the_tables_come_later(tmp_path: Path) -> None:
    files = tmp_path / "artifacts"
    files.write_text("no folder")
    tracker = RunTracker(f"sqlite:///{tmp_path}/mlflow.db", "refused", "toy", files, timeout_s=LONG_S, back_off_s=0.0)
    run = ToyRun(tmp_path, ("evaluation.every=1", "guards.min_free_disk=0", "iterations=2"), tracker=tracker)
    run.train()
    records = run.records()
    score = [(r.iteration, r.metrics["score/mean"]) for r in records if "score/mean" in r.metrics]

    def shown(name: str) -> list[tuple[int, float]]:
        return [(step, value) for key, step, value, _ in rows(run.home, tracker.run_id) if key == name]

    with ended_well(run.context()) as context:
        complaint = report(context, records[2])
        assert complaint is not None
        assert shown("score/mean") == score
        assert shown("seconds/iteration") == []  # by it a report is known as complete
        files.unlink()
        assert report_end(context) is None
    assert shown("score/mean") == score
    assert [step for step, _ in shown("seconds/iteration")] == [0, 1, 2]
    tables = sorted(path.name for path in files.rglob("iteration_*.json"))
    assert tables == [f"iteration_{number:06d}.json" for number in range(3)]
