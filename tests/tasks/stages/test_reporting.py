"""What is told beside the training: one thing at a time, and a failure there is no traceback on the console."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tasks.reports.mlflow import NOTE, show_progress
from tasks.stages.reporting import Reporting
from tests.tasks.toy_runs import ToyRun
from tests.waiting import LONG_S


def fail() -> None:
    """As a report might."""
    raise ValueError("no curve to draw")


def test_what_fails_aside_is_in_the_log_and_the_next_thing_is_done(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    reporting, done, hold = Reporting(), [], threading.Event()
    reporting.aside(fail)
    reporting.settle()
    assert "no curve to draw" in caplog.text
    assert "Exception in thread" not in capsys.readouterr().err
    reporting.aside(lambda: hold.wait(LONG_S))
    reporting.aside(lambda: done.append("while another is under way"))
    hold.set()
    reporting.settle()
    reporting.aside(lambda: done.append("afterwards"))
    reporting.settle()
    assert done == ["afterwards"]


def test_iterations_that_are_taken_out_of_the_run_are_forgotten() -> None:
    reporting = Reporting({number: {} for number in range(3)})
    reporting.forget([2, 3])
    assert sorted(reporting.metrics) == [0, 1]


def test_the_curves_are_drawn_no_more_often_than_asked(tmp_path: Path, prefect_server: None) -> None:
    run = ToyRun(tmp_path)
    (*_, last) = run.train("iterations=1")
    context, drawn = run.context("iterations=1"), run.tracker.figures
    context.reporting.metrics[last.iteration] = last.metrics
    assert show_progress(context, last, at_most_every_s=1000.0)
    assert (run.tracker.figures - drawn, run.tracker.tags[NOTE].count("Iteration")) == (0, 1)
    assert show_progress(context, last)
    context.reporting.drawn_at -= 1001.0
    assert show_progress(context, last, at_most_every_s=1000.0)
    assert run.tracker.figures - drawn == 2


def test_what_is_made_aside_ends_before_the_process() -> None:
    """In the middle of a picture it would abort."""
    reporting, done = Reporting(), list[int]()
    reporting.aside(lambda: (time.sleep(0.5), done.append(1)))
    reporting.close()
    assert done == [1]
