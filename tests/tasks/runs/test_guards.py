"""Guards: every limit, what a stopped run leaves and says, and a disk that is too full for an iteration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.runs.records import RecordCorrupted
from ppo_core.spec import GuardsSpec
from tasks.runs.errors import DiskSpaceError, DivergedError
from tasks.runs.guards import violations
from tasks.runs.iteration_record import read_record
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, digests, replace

SHORT = ("dataset.evaluation=null", "registry.metric=score/mean", "iterations=3")
LIMITS = [
    ("max_kl", 5.0, "kl/reference", 5.0, 5.001),
    ("min_entropy", 0.1, "policy/entropy", 0.1, 0.099),
    ("max_length_growth", 3.0, "rollout/response_length", 30.0, 30.1),
    ("min_length_growth", 0.5, "rollout/response_length", 5.0, 4.99),
    ("max_clip_fraction", 0.5, "policy/clip_fraction", 0.5, 0.501),
    ("max_repetition", 0.2, "response/repetition", 0.2, 0.201),
    ("max_length_correlation", 0.5, "response/length_correlation", 0.5, 0.501),
    ("min_distinct", 0.3, "response/distinct_2", 0.3, 0.299),
    ("max_sampler_difference", 1.0, "sampler/logprob_difference_mean", 1.0, 1.001),
]


@pytest.mark.parametrize(("setting", "limit", "metric", "allowed", "too_far"), LIMITS)
def test_a_limit_is_passed_beyond_it_and_by_what_is_no_number(
    setting: str, limit: float, metric: str, allowed: float, too_far: float
) -> None:
    off = {"max_sampler_difference": None}
    guards = GuardsSpec.model_validate({**off, setting: limit})
    assert violations(guards, {metric: allowed}, 10.0) == []
    assert violations(guards, {}, 10.0) == []
    assert violations(GuardsSpec.model_validate(off), {metric: math.nan}, 10.0) == []
    for value in (too_far, math.nan, -math.inf if setting.startswith("min_") else math.inf):
        [found] = violations(guards, {metric: value}, 10.0)
        assert (found.setting, found.limit) == (setting, limit)
        assert str(found).endswith(f" passes guards.{setting}={limit:g}")


def test_length_growth_is_measured_against_the_first_iteration_alone() -> None:
    guards = GuardsSpec(max_length_growth=2.0)
    assert violations(guards, {"rollout/response_length": 1e9}, None) == []
    [found] = violations(guards, {"rollout/response_length": 25.0}, 10.0)
    assert (found.metric, found.value) == ("length growth", 2.5)


def test_all_limits_that_are_passed_are_named() -> None:
    guards = GuardsSpec(max_kl=1.0, min_entropy=1.0)
    metrics = {"kl/reference": 2.0, "policy/entropy": 0.5}
    assert [found.setting for found in violations(guards, metrics, None)] == ["max_kl", "min_entropy"]


def test_gold_may_fall_where_the_score_does_not_rise() -> None:
    guards = GuardsSpec(gold_reward="gold", max_gold_fall=0.5)
    assert violations(guards, {"gold/change": -9.0, "gold/score_change": 0.0}, None) == []
    assert violations(guards, {"gold/change": -0.5, "gold/score_change": 1.0}, None) == []
    assert violations(guards, {"gold/change": 9.0, "gold/score_change": 1.0}, None) == []
    [found] = violations(guards, {"gold/change": -0.75, "gold/score_change": 1e-9}, None)
    assert str(found) == "gold fall=0.75 passes guards.max_gold_fall=0.5"


GOLD = (0.0, 2.0, 4.0, 3.0, 1.0, 0.0)
"""Of the iterations from 1 on. Means of two: 1, 3, 3.5, 2, 0.5."""


@pytest.mark.usefixtures("prefect_server")
def test_a_run_whose_gold_reward_falls_while_its_score_rises_is_stopped(tmp_path: Path) -> None:
    def measures(iteration: int, rate_factor: float) -> Mapping[str, float]:
        return {"score/mean": float(iteration), "score/correct": GOLD[iteration - 1]}

    guards = ("guards.gold_reward=correct", "guards.gold_window=2", "guards.max_gold_fall=1", "iterations=6")
    run = ToyRun(tmp_path, (*SHORT, *guards), engines=ToyEngines(measures))
    with pytest.raises(DivergedError, match=r"iteration 6 of run toy diverged: gold fall=3 passes guards\.max_gold"):
        run.train()
    told = [{name: value for name, value in record.metrics.items() if "gold" in name} for record in run.records()]
    assert told[:4] == [{}] * 4
    assert told[4:] == [{"gold/change": 2.5, "gold/score_change": 2.0}, {"gold/change": -1.0, "gold/score_change": 2.0}]
    assert len(run.train("guards.max_gold_fall=3")) == 7


@pytest.mark.usefixtures("prefect_server")
def test_an_iteration_without_a_gold_score_is_told_and_its_guard_not_taken_for_passed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def measures(iteration: int, rate_factor: float) -> Mapping[str, float]:
        gold = {} if iteration == 2 else {"score/correct": float(-iteration)}
        return {"score/mean": float(iteration), **gold}

    guards = ("guards.gold_reward=correct", "guards.gold_window=2", "guards.max_gold_fall=1", "iterations=6")
    run = ToyRun(tmp_path, (*SHORT, "reward.max_failed_fraction=1", *guards), engines=ToyEngines(measures))
    with pytest.raises(DivergedError, match=r"iteration 6 of run toy diverged: gold fall=2 passes"):
        run.train()
    told = [{name: value for name, value in record.metrics.items() if "gold" in name} for record in run.records()]
    assert told == [{}, {}, *[{"gold/unmeasured": 1.0}] * 4]
    for iteration, of in ((2, 2), (5, 4)):
        message = (
            f"iteration {iteration}: guards.max_gold_fall=1 was not checked, because 1 of the last {of} iterations "
            "have no score by guards.gold_reward=correct: see why in the column error of scores.parquet, or lower "
            "reward.max_failed_fraction=1, and such an iteration fails"
        )
        assert f"! {message}" in run.said
        assert message in caplog.messages


@pytest.mark.usefixtures("prefect_server")
def test_responses_too_short_for_a_guard_are_told_and_it_is_not_taken_for_passed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def measures(iteration: int, rate_factor: float) -> Mapping[str, float]:
        return {"response/distinct_2": 0.5} if iteration == 1 else {}

    run = ToyRun(tmp_path, (*SHORT, "guards.min_distinct=0.1"), engines=ToyEngines(measures))
    run.train()
    for iteration, told in ((1, False), (2, True), (3, True)):
        start = f"iteration {iteration}: guards.min_distinct=0.1 was not checked, because no response has two tokens"
        assert (f"! {start}" in run.said) == told
        assert (start in caplog.text) == told


def measured(metric: str, value: float) -> ToyEngines:
    """Engines that measure something odd in iteration 2."""

    def measures(iteration: int, rate_factor: float) -> Mapping[str, float]:
        return {metric: value} if iteration == 2 else {}

    return ToyEngines(measures)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("override", "metric", "value", "told"),
    [
        ("guards.max_kl=5", "kl/reference", 9.5, "kl/reference=9.5 passes guards.max_kl=5"),
        ("guards.max_kl=5", "kl/reference", math.nan, "kl/reference=nan passes guards.max_kl=5"),
        (
            "guards.max_length_growth=3",
            "rollout/response_length",
            40.0,
            "length growth=4 passes guards.max_length_growth=3",
        ),
    ],
)
def test_a_run_that_is_stopped_keeps_the_evidence_and_says_how_to_go_on(
    override: str, metric: str, value: float, told: str, tmp_path: Path
) -> None:
    run = ToyRun(tmp_path, (*SHORT, override), engines=measured(metric, value))
    with pytest.raises(DivergedError) as stopped:
        run.train()
    message = str(stopped.value)
    evidence = tmp_path / "store" / "runs" / "toy" / "divergences" / "000001.json"
    assert f"iteration 2 of run toy diverged: {told}." in message
    assert f"its evidence is kept: {evidence}." in message
    resume = "ppoflow resume toy --set guards.on_divergence="
    for remedy in (f"{resume}rollback", "ppoflow fork toy@1 NEW --set", f"{resume}warn"):
        assert remedy in message
    assert [record.iteration for record in run.records()] == [0, 1]
    [note] = run.notes("divergences")
    assert note["passed"] == [told]
    assert run.place(read_record(note["record"]).checkpoint).is_dir()


def damaged_in_the_third(home: Path, name: str, *overrides: str) -> ToyRun:
    """A run that diverges in iterations 2 (at first) and 3, amid which one of its files is damaged."""

    def measures(iteration: int, rate_factor: float) -> Mapping[str, float]:
        if iteration == 3:
            replace(run.folder / name, b"{")
        return {"kl/reference": 9.5} if iteration == 3 or (iteration, rate_factor) == (2, 1.0) else {}

    overrides = (*SHORT, "guards.max_kl=5", "guards.on_divergence=rollback", *overrides)
    run = ToyRun(home, overrides, engines=ToyEngines(measures))
    return run


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "name",
    ["iterations/000000.json", "iterations/000001.json", "divergences/000001.json", "rollbacks/000001.json"],
)
def test_what_is_damaged_on_the_way_does_not_hide_that_the_run_diverged(name: str, tmp_path: Path) -> None:
    run = damaged_in_the_third(tmp_path, name, "guards.rollback_iterations=2")
    with pytest.raises(DivergedError) as stopped:
        run.train()
    assert "iteration 3 of run toy diverged: kl/reference=9.5 passes guards.max_kl=5." in str(stopped.value)
    assert "Besides, what the run has written could not be read: " in str(stopped.value)
    assert f"{name} is no JSON" in str(stopped.value)
    assert len([*run.folder.glob("iterations/*.json")]) == 3  # nothing is given up


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("override", ["guards.max_kl=99", "guards.on_divergence=warn"])
def test_a_damaged_record_of_a_run_that_goes_on_is_what_ends_it(override: str, tmp_path: Path) -> None:
    with pytest.raises(RecordCorrupted, match=r"000001\.json is no JSON"):
        damaged_in_the_third(tmp_path, "iterations/000001.json", override).train()


@pytest.mark.usefixtures("prefect_server")
def test_started_again_it_stops_at_the_same_place_without_a_second_note(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, (*SHORT, "guards.max_kl=5"), engines=measured("kl/reference", 9.0))
    messages = set()
    for _ in range(3):
        with pytest.raises(DivergedError) as stopped:
            run.train()
        messages.add(str(stopped.value))
    assert len(messages) == 1
    assert len(run.notes("divergences")) == 1
    assert run.engines.count("update_policy") == 2
    assert re.search("000001.json", messages.pop())


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("value", [9.0, math.nan])
def test_with_warn_it_goes_on_and_the_record_tells_of_it(value: float, tmp_path: Path) -> None:
    told = f"kl/reference={value:g} passes guards.max_kl=5"
    run = ToyRun(tmp_path, (*SHORT, "guards.max_kl=5", "guards.on_divergence=warn"))
    run.engines = measured("kl/reference", value)
    records = run.train()
    assert [record.violations for record in records] == [[], [], [told], []]
    assert f"iteration 2: {told}; continuing, because guards.on_divergence=warn" in run.said
    assert run.notes("divergences") == []
    assert digests(records) == digests(run.train())


@pytest.mark.usefixtures("prefect_server")
def test_a_disk_without_room_for_an_iteration_stops_the_run_before_it(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SHORT)
    with pytest.raises(DiskSpaceError) as refusal:
        run.train("guards.min_free_disk=1e15")
    for part in ("iteration 1 may take", "guards.min_free_disk=1e+15", "ppoflow gc", "checkpoint.keep_last"):
        assert part in str(refusal.value)
    assert run.engines.count("generate_rollouts") == 0
    assert [record.iteration for record in run.train("guards.min_free_disk=0")] == [0, 1, 2, 3]
    with pytest.raises(DiskSpaceError, match="iteration 4 may take"):
        run.train("guards.min_free_disk=1e15", "iterations=4")
