"""The losses of supervised fine-tuning: told live and told from the record they are the same points."""

from __future__ import annotations

from pathlib import Path

from infra.engines.protocol import EngineProgress
from ppo_core.records import loss_note, noted_loss
from tasks.reports.loss_curve import LOSS_CURVE, LiveCurve, curve_points
from tests.tasks.toy_engines import LOSSES
from tests.tasks.toy_runs import ToyRun
from tests.waiting import until


def test_live_points_are_those_of_the_record(tmp_path: Path, prefect_server: None) -> None:
    run = ToyRun(tmp_path)
    (record, *_) = run.train("iterations=1")
    context = run.context("iterations=1")
    wanted = set(curve_points(context, record))
    assert [(point.key, point.step, point.value) for point in sorted(wanted, key=lambda point: point.step)] == [
        (LOSS_CURVE, step, loss) for step, loss in enumerate(LOSSES, start=1)
    ]
    assert wanted <= run.tracker.points
    run.tracker.points.clear()
    context.reporting.live = True
    curve = LiveCurve(context, record.dataset, every_s=0.0)
    for step, loss in enumerate(LOSSES, start=1):
        curve.on_progress(EngineProgress("training", "finetune_policy", step, len(LOSSES), loss_note(loss)))
        until(lambda step=step: len(run.tracker.points) == step, "the point is sent")
    assert run.tracker.points == wanted


def test_a_run_that_is_not_shown_sends_nothing(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    (record, *_) = run.train("iterations=1")
    run.tracker.points.clear()
    curve = LiveCurve(run.context("iterations=1"), record.dataset, every_s=0.0)
    curve.on_progress(EngineProgress("training", "finetune_policy", 1, 1, loss_note(1.0)))
    assert run.tracker.points == set()


def test_a_note_gives_back_the_loss_as_it_is_recorded() -> None:
    for loss in (5.17249, 0.00005, 123.45675):
        assert noted_loss(loss_note(loss)) == round(loss, 4)
    assert noted_loss("rows tokenized") is None
