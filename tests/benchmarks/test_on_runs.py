"""What the benchmarks make of what runs say and record, and of figures: against what was put in."""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import chaos, iteration, overhead, report, variants
from benchmarks.attacks import DPO, TRAINING, Flow
from benchmarks.overhead import after_warm_up, medians
from benchmarks.scaling import fitted, gained, series_of
from benchmarks.shapes import SHAPES
from benchmarks.startup import causes
from benchmarks.variants import SCHEDULE, VARIANTS, spread
from flows.console import RunConsole
from flows.starting import timed
from infra.engines.protocol import EngineProgress
from ppo_core.spec import DpoSpec, RunSpec
from tests.flows.samples import record


def said(iterations: int) -> list[str]:
    """What a run says on its way to a committed iteration."""
    buffer = io.StringIO()
    console = RunConsole("r", 2, Console(file=buffer, width=160))
    console.say("starting: run r from spec.yaml")
    console.say(timed("checking the spec, its data, rewards and model", 0.0))
    console.step("run r; Prefect page http://127.0.0.1:4200 (flow ppo-training)")
    console.progress(EngineProgress("training", "finetune_policy", 0, 0, ""))
    for number in range(iterations + 1):
        console.iteration(record(number, {"score/mean": 0.5}))
        console.progress(EngineProgress("training", "update_policy", 3, 8, "epoch 1 of 2"))
    return buffer.getvalue().splitlines()


def test_the_seconds_of_a_start_go_to_what_was_under_way() -> None:
    lines = [(2.0**number, line) for number, line in enumerate(said(iterations=1))]
    found = causes(lines)
    assert list(found.values()) == [1.0, 1.0, 2.0, 4.0, 24.0, 32.0]  # a heading of the table comes before record 0
    names = list(found)
    assert names[2] == "checking the spec, its data, rewards and model"
    assert names[4] == "finetune_policy, the training engine is starting"
    assert names[5] == "iteration 1"


@pytest.mark.parametrize("flow", [TRAINING, DPO], ids=["train", "dpo"])
@pytest.mark.parametrize("variant", chaos.VARIANTS)
def test_attacks_are_of_moments_that_come_and_of_processes_that_are_there(flow: Flow, variant: str) -> None:
    drawn = [chaos.planned(flow, variant, 5, 2, random.Random(seed)) for seed in range(40)]
    order = [*flow.moments]
    for attacks in drawn:
        places = [order.index(attack.moment) for attack in attacks]
        assert len(set(places)) == 5
        assert places == sorted(places) or not flow.once
        assert sum(attack.how == "stop" for attack in attacks) <= 2
        hit = [attack.moment for attack in attacks if attack.victim == "rank 1"]
        assert bool(hit) == (
            variant == "2 ranks" and any("rank 1" in flow.moments[one.moment].victims for one in attacks)
        )
    victims = {(attack.moment, attack.victim) for attacks in drawn for attack in attacks}
    known = {(name, victim) for name, moment in flow.moments.items() for victim in moment.victims}
    assert victims == {(name, victim) for name, victim in known if variant == "2 ranks" or victim != "rank 1"}


def test_results_of_dpo_and_of_the_others_stand_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(algorithm: str, same: bool) -> dict[str, object]:
        outcome = {"how": "kill", "orphans": 0, "half_artifacts": 0}
        clean = {"same": same, "half_artifacts": 0, "left_running": 0}
        return {"algorithm": algorithm, **clean, "outcomes": [outcome, outcome]}

    monkeypatch.setattr(chaos, "RESULTS", tmp_path / "chaos.json")
    chaos.write(1, [ran("ppo", True)])
    chaos.write(2, [ran("dpo", True), ran("dpo", False)])
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert (found["seed"], found["attacks"], found["survived"]) == (1, 2, 2)
    assert (found["dpo"]["seed"], found["dpo"]["attacks"], found["dpo"]["survived"]) == (2, 4, 2)
    chaos.write(3, [ran("grpo", True)])
    assert json.loads((tmp_path / "chaos.json").read_text())["dpo"] == found["dpo"]


def test_a_start_without_an_iteration_is_an_error() -> None:
    with pytest.raises(ValueError, match="no iteration 1"):
        causes((1.0, line) for line in said(iterations=0))


def test_overheads_are_those_of_the_iterations_between_start_and_end() -> None:
    records = [{"metrics": {"seconds/iteration": 10.0 * n, "seconds/outside_engines": float(n)}} for n in range(6)]
    found = {"a folder": after_warm_up(records)}
    assert [one["iteration"] for one in found["a folder"]] == [20.0, 30.0, 40.0]
    assert medians(found)["a folder"]["outside_engines"] == 3.0


@pytest.mark.parametrize("benchmark", [overhead, iteration])
def test_iterations_of_which_none_would_count_are_refused(benchmark, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", "--iterations", "2"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "2 is too few, as first and last do not count: 3 or more" in capsys.readouterr().err


def test_an_exponent_is_that_of_the_power_that_was_put_in() -> None:
    sizes = [10, 20, 40]
    fits = fitted(sizes, {"square": [3.0 * x * x for x in sizes], "linear": [0.1 * x for x in sizes]})
    assert fits["square"]["exponent"] == pytest.approx(2.0)
    assert fits["linear"]["exponent"] == pytest.approx(1.0)
    assert (fits["square"]["over_linear"], fits["linear"]["over_linear"]) == pytest.approx((4.0, 1.0))


def test_a_gain_is_the_median_of_each_rounds_own() -> None:
    def rounds(*steps: float) -> list[dict[str, dict[str, float]]]:
        return [{"seconds": {"experience": 1.0, "steps": spent}} for spent in steps]

    assert gained(rounds(4.0, 40.0, 6.0), rounds(2.0, 10.0, 2.0)) == {"experience": 1.0, "steps": 3.0}


def test_sizes_grow_one_at_a_time() -> None:
    series = series_of(SHAPES["27M"])
    assert {name: list(sizes) for name, sizes in series.items()} == {
        "tokens": [32 * 80, 64 * 80, 128 * 80],
        "length": [80, 144, 272],
        "vocabulary": [8000, 16_000, 32_000],
    }
    first = {name: next(iter(sizes.values())).arguments for name, sizes in series.items()}
    assert first["tokens"] == ("--responses", "32", "--shortest", "64", "--longest", "64")
    assert first["vocabulary"] == ("--responses", "32", "--vocabulary", "8000")


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report.show("title", ("side", "seconds"), [["ours", 1.0], ["the other", 12.345]])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "title",
        "side       seconds",
        "ours          1.00",
        "the other    12.35",
    ]
    report.save("x", argparse.Namespace(results=tmp_path, rounds=3), {"a": 1})
    written = json.loads((tmp_path / "x.json").read_text())
    assert (written["figures"], written["settings"]["rounds"]) == ({"a": 1}, 3)
    assert {"cores", "load"} < written["machine"].keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_spec_of_as_many_responses_as_the_demo(name: str) -> None:
    demo = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.yaml"
    spec = RunSpec.from_yaml(demo, [*VARIANTS[name], *SCHEDULE, "iterations=10"])
    assert spec.rollout.num_responses == RunSpec.from_yaml(demo).rollout.num_responses
    assert (spec == RunSpec.from_yaml(demo, [*SCHEDULE, "iterations=10"])) is (name == "demo")


def test_the_row_of_dpo_stands_among_the_others_with_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert DpoSpec.from_yaml(Path(__file__).parents[2] / "examples" / "helpful" / "dpo.yaml", list(variants.DPO))
    length = {"1": 10.0}
    demo = {"variant": "demo", "accuracy": {"0": 0.25, "5": 0.5, "10": 0.75}, "kl": {"1": 0.0, "10": 1.5}}
    dpo = {"variant": "dpo", "accuracy": {"0": 0.25, "10": 0.875}, "kl": {}}
    variants.show([{**demo, "response_length": length}, {**dpo, "response_length": length}], 10)
    rows = {line.split()[1]: line.split("│")[2:-1] for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert [cell.strip() for cell in rows["demo"]][-2:] == ["1.50", "3"]
    assert [cell.strip()[:5] for cell in rows["dpo"]] == ["1", "0.250", "", "0.875", "", "3"]


def test_a_spread_is_the_mean_between_the_ends() -> None:
    assert spread([0.5, 0.75, 1.0]) == "0.750 (0.50 to 1.00)"
