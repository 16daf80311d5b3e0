"""Where an iteration's seconds go adds up."""

from __future__ import annotations

import time

import pytest

from tasks.stages.timings import Timings


def test_the_seconds_of_an_iteration_add_up() -> None:
    timings = Timings()
    timings.add("update_policy", wall=0.03, engine=0.02)
    timings.add("update_policy", wall=0.01, engine=0.01)
    with timings.outside("store"):
        time.sleep(0.01)
    metrics = timings.measured()
    assert metrics["seconds/update_policy"] == pytest.approx(0.04)
    assert metrics["seconds/engines"] == pytest.approx(0.03)
    assert metrics["seconds/outside_store"] >= 0.01
    parts = metrics["seconds/outside_store"] + metrics["seconds/outside_prefect_and_rest"]
    assert parts == pytest.approx(metrics["seconds/outside_engines"])
    assert metrics["seconds/engines"] + metrics["seconds/outside_engines"] == pytest.approx(
        metrics["seconds/iteration"]
    )


def test_restarting_begins_the_next_iteration() -> None:
    timings = Timings()
    timings.add("score_rollouts", wall=5.0, cached=True)
    assert timings.cached_stages() == ["score_rollouts"]
    timings.restart()
    assert timings.cached_stages() == []
    assert "seconds/score_rollouts" not in timings.measured()
