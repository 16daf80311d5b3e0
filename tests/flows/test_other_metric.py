"""A finished run that is to be registered by another metric than the one that its records chose the best by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from flows.ppo import finish
from infra.mlflow.registry import describe
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, ended_well, lose_it

pytestmark = pytest.mark.usefixtures("prefect_server")
FIRST, OTHER = "policy/quality", "policy/taste"
SETTINGS = ("iterations=3", "dataset.evaluation=null", f"registry.metric={FIRST}")


def at_odds(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """The last is best by the first metric, the one before by the other, then that of iteration 1."""
    return {FIRST: float(iteration), OTHER: [0.0, 2.0, 3.0, 1.0][iteration]}


@pytest.mark.parametrize(("lost", "best"), [([], 2), ([2], 1)])
def test_its_best_policy_is_that_by_the_metric_of_now(tmp_path: Path, lost: list[int], best: int) -> None:
    run = ToyRun(tmp_path, SETTINGS, engines=ToyEngines(at_odds))
    records = run.train()
    assert (records[-1].best.metric, records[-1].best.iteration) == (FIRST, 3)
    for iteration in lost:
        lose_it(run.place(records[iteration].checkpoint))
    with ended_well(run.context(f"registry.metric={OTHER}", "registry.model=by-taste")) as context:
        report = finish(context, run.console(), records[-1])
        version = describe(context.settings.tracking_uri, "models:/by-taste/1")
    value = records[best].metrics[OTHER]
    assert (report.best_iteration, report.best_value) == (best, value)
    assert (version.tags["ppoflow.metric"], version.tags["ppoflow.iteration"]) == (f"{OTHER}={value}", str(best))


def test_by_the_metric_of_its_records_it_stays_the_one_that_they_name(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SETTINGS, engines=ToyEngines(at_odds))
    records = run.train()
    with ended_well(run.context()) as context:
        report = finish(context, run.console(), records[-1])
    assert (report.best_iteration, report.best_value) == (3, 3.0)
