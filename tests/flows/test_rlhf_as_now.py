"""The whole way gone on with after its training: gates, engines and folders are those of the last command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flows.rlhf import rlhf
from ppo_core.spec import RlhfSpec
from tasks.preferences.given import places_of
from tasks.runs.run_state import spec_to_go_on
from tests.flows.test_promotion_flow import answering
from tests.flows.test_rlhf import HELPFUL, SMALL, spec
from tests.tasks.toy_engines import ToyEngines, better_each_time
from tests.tasks.toy_runs import Killed, ToyRun, killed

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("prefect_server")]
SHORT = ("promote=false", "evaluate=false")


def test_a_finished_run_is_promoted_under_the_gates_that_are_given_now(
    home: Path, toys: ToyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record tells of them, for no iteration was made with them."""
    rlhf(spec(*SHORT), "gated")
    done, asked = len(toys.done), answering(monkeypatch, None)
    refused = rlhf(spec("run.promotion.approval=true", "run.promotion.approval_timeout_h=1.0e-5"), "gated").promotion
    assert refused is not None
    assert (asked, refused.moved) == (["None to 1"], None)
    assert refused.verdict == "nobody answered within 1e-05 h"
    moved = rlhf(spec("run.promotion.alias=released"), "gated").promotion
    assert moved is not None
    assert moved.trial is not None
    assert (moved.trial.alias, moved.moved is None) == ("released", False)
    assert "update_policy" not in toys.done[done:]


def test_what_ran_on_a_cluster_is_evaluated_on_the_engines_of_now(home: Path, toys: ToyEngines) -> None:
    toys.jobs["score_evaluation"] = better = better_each_time()
    rlhf(spec(*SHORT, "run.iterations=1"), "placed")
    asked = spec("run.iterations=2")
    places = places_of(asked, "placed")
    there = ToyRun(home, name="placed")
    there.engines.jobs["score_evaluation"] = better
    records = there.train(
        spec=asked.run_with(places.reward_model, places.policy).with_overrides(["engines.backend=ray"])
    )
    assert (records[-1].best.iteration, records[-1].changed["engines.backend"]) == (2, "ray")
    report = rlhf(asked, "placed")
    assert (report.evaluation.iteration, report.promotion.moved is None) == (2, False)  # type: ignore[union-attr]
    assert spec_to_go_on("placed").engines.backend == "ray"  # no iteration was made since


def test_it_is_evaluated_and_promoted_with_the_sources_where_they_are_now(
    home: Path, toys: ToyEngines, tmp_path: Path
) -> None:
    shutil.copytree(HELPFUL, tmp_path / "before")
    toys.before("update_policy", 2, killed)
    with pytest.raises(Killed):
        rlhf(RlhfSpec.from_yaml(tmp_path / "before" / "rlhf.yaml", SMALL), "moved")
    (tmp_path / "before").rename(tmp_path / "after")
    report = rlhf(RlhfSpec.from_yaml(tmp_path / "after" / "rlhf.yaml", SMALL), "moved")
    assert report.evaluation is not None
    assert report.promotion is not None
    assert report.promotion.moved is not None
