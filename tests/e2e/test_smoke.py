"""The whole loop on the real stack: what a finished run leaves, and how it goes on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sqlite3
import warnings
from collections import Counter
from pathlib import Path

import pytest

from infra.artifacts.export import check_export
from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import artifact, flip_a_bit, policy_bytes, processes_of, records, train
from tests.processes import command_line

DAMAGED = "compute_advantages"
STAGES = ("generate_rollouts", "score_rollouts", DAMAGED, "update_policy")


def task_states(home: Path) -> Counter[tuple[str, str]]:
    """(task, state) as Prefect's own database has them."""
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        rows = database.execute("select name, state_name from task_run").fetchall()
    return Counter((name.rpartition("-")[0], state) for name, state in rows)


def test_every_iteration_is_committed_with_its_metrics(smoke: FinishedRun) -> None:
    found = records(smoke.home, "first")
    assert [record["iteration"] for record in found] == [0, 1, 2, 3, 4]
    for record in found[1:]:
        metrics = record["metrics"]
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["sampler/logprob_difference_max"] < 1e-3
        assert metrics["kl/coef"] == 0.01
        assert record["position"] == 32 * record["iteration"]
    assert found[1]["metrics"]["kl/reference"] == pytest.approx(0.0, abs=1e-6)  # nothing was learned before it
    assert found[4]["metrics"]["kl/reference"] > 0


def this_machine() -> str:
    """What the last bits of a sum depend on: the processor, and how many threads share the work."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    found = {name.strip(): value.strip() for name, value in facts.items()}
    model = "-".join(found.get(name, "?") for name in ("cpu family", "model", "stepping"))
    return f"{found.get('vendor_id', '?')} {model}, {os.cpu_count()} cores"


def test_the_bytes_are_those_of_earlier_versions(smoke: FinishedRun) -> None:
    """Who means to change them writes the new digests down. Those of the policies are known for some processors."""
    pinned = json.loads((Path(__file__).parent / "smoke_digests.json").read_text())
    found = records(smoke.home, "first")
    assert {record["dataset"]["digest"] for record in found} == {pinned["dataset"]}
    policies = [hashlib.sha256(policy_bytes(smoke.home, record)).hexdigest() for record in found]
    assert len(set(policies)) == len(policies)
    if this_machine() not in pinned["policies"]:
        warnings.warn(f"the policies' bytes are pinned for no {this_machine()}: {policies}", stacklevel=1)
    assert policies == pinned["policies"].get(this_machine(), policies), (this_machine(), policies)


def test_the_flow_process_is_small_and_free_of_torch(smoke: FinishedRun) -> None:
    assert smoke.heavy_imports == []
    assert smoke.peak_mib < 400


def test_nothing_is_left_running(smoke: FinishedRun) -> None:
    assert [command_line(process) for process in processes_of(smoke.home)] == []


def test_the_best_policy_lies_there_and_is_registered_without_a_copy(smoke: FinishedRun) -> None:
    policy = smoke.report["policy"]
    source = Path(policy["source"].removeprefix("file://"))
    assert policy["name"] == "arithmetic-smoke"
    assert source.is_relative_to(smoke.home / "store" / "checkpoint")
    weights = source / "model.safetensors"
    exported = Path(smoke.report["policy_folder"]) / "model.safetensors"
    assert exported.read_bytes() == weights.read_bytes()
    # Whoever writes into the copy leaves the store as it is.
    assert (exported.stat().st_nlink, exported.stat().st_ino != weights.stat().st_ino) == (1, True)
    assert check_export(exported.parent) is not None
    assert (source / "MLmodel").is_file()


def test_mlflow_has_each_point_once(smoke: FinishedRun) -> None:
    with sqlite3.connect(smoke.home / "mlflow" / "mlflow.db") as database:
        rows = database.execute("select key, step, count(*) from metrics group by key, step").fetchall()
        status = database.execute("select status from runs").fetchall()
    assert status == [("FINISHED",)]
    assert {count for _, _, count in rows} == {1}
    assert {step for key, step, _ in rows if key == "seconds/iteration"} == {0, 1, 2, 3, 4}
    assert {step for key, step, _ in rows if key == "policy/entropy"} == {1, 2, 3, 4}


def test_mlflow_knows_the_run_from_its_start_on(smoke: FinishedRun) -> None:
    start = records(smoke.home, "first")[0]
    with sqlite3.connect(smoke.home / "mlflow" / "mlflow.db") as database:
        ((begun,),) = database.execute("select start_time from runs").fetchall()
        tags = dict(database.execute("select key, value from tags").fetchall())
        losses = database.execute("select value from metrics where key = 'sft/loss_curve' order by step").fetchall()
        inputs = database.execute("select name from datasets order by name").fetchall()
        (busy,) = database.execute("select count(*) from metrics where key like 'system/cpu%'").fetchone()
    assert begun < start["committed_at_ms"] - 1000 * start["metrics"]["seconds/finetune_policy"]
    assert [loss for (loss,) in losses] == artifact(start, "model")["losses"]
    assert len(losses) == 50
    names = ("held_out (evaluation)", "prompts (training)", "sft_examples (supervised)")
    assert [name for (name,) in inputs] == [f"generate.py:{name}" for name in names]
    assert busy > 0
    assert Path(tags["mlflow.source.name"]).name == "arithmetic"
    assert "Iteration 4 of 4 is done; best by evaluation/score" in tags["mlflow.note.content"]


def test_prefect_and_mlflow_have_the_report_of_the_data(smoke: FinishedRun) -> None:
    with sqlite3.connect(smoke.home / "prefect" / "prefect.db") as database:
        ((page,),) = database.execute("select data from artifact where key = 'first-dataset'").fetchall()
    (file,) = (smoke.home / "mlflow" / "artifacts").rglob("dataset/report.json")
    told = json.loads(file.read_text())
    counts = records(smoke.home, "first")[0]["dataset"]["counts"]
    assert {split: facts["rows"] for split, facts in told["splits"].items()} == counts
    assert f"| evaluate with | {counts['eval']:,} |" in json.loads(page)
    assert file.with_name("report.md").read_text() == json.loads(page)


def test_prefect_has_the_table_of_iterations_from_the_first_on_and_tags(smoke: FinishedRun) -> None:
    with sqlite3.connect(smoke.home / "prefect" / "prefect.db") as database:
        tables = database.execute("select data, created from artifact where key = 'first-iterations'").fetchall()
        (second,) = database.execute("select start_time from task_run where name = 'update_policy-1'").fetchone()
        (tags,) = database.execute("select tags from flow_run").fetchone()
        told = database.execute(
            "select message from task_run join task_run_state s on s.id = state_id where task_run.name in "
            "('generate_rollouts-2', 'score_rollouts-2') order by task_run.name"
        ).fetchall()
    ((data, created),) = tables  # one that is renewed
    rows = json.loads(json.loads(data))
    assert created < second
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert list(rows[0])[:3] == ["iteration", "score/mean", "evaluation/accuracy"]
    assert json.loads(tags) == ["arithmetic-smoke", "first", "ppoflow"]
    assert re.fullmatch(r"32 responses, [0-9,]+ tokens in [0-9.]+ s", told[0][0])
    assert re.fullmatch(r"mean [0-9.]+, unscored 0 in [0-9.]+ s", told[1][0])


def test_prefect_shows_every_stage_completed(smoke: FinishedRun) -> None:
    states = task_states(smoke.home)
    assert all(states[(stage, "Completed")] >= 4 for stage in STAGES)
    assert {state for _, state in states} <= {"Completed", "Cached"}
    with sqlite3.connect(smoke.home / "prefect" / "prefect.db") as database:
        names = [name for (name,) in database.execute("select name from task_run")]
    assert {f"{stage}-{number}" for stage in STAGES for number in range(1, 5)} <= set(names)


@pytest.mark.thorough
def test_another_run_takes_everything_from_the_store_but_what_is_damaged(smoke: FinishedRun, tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    shutil.copytree(smoke.home / "store", home / "store")  # the store alone, in another place
    shutil.rmtree(home / "store" / "runs")
    experience = artifact(records(smoke.home, "first")[4], "experience")
    flip_a_bit(home / "store" / "experience" / experience["uri"].rpartition("/")[2] / "experience.safetensors")
    done = train(home, "second")
    assert done.returncode == 0, done.stdout + done.stderr
    states = task_states(home)
    assert {stage: states[(stage, "Cached")] for stage in STAGES} == {**dict.fromkeys(STAGES, 4), DAMAGED: 3}
    made = records(home, "second")
    for ours, theirs in zip(made, records(smoke.home, "first"), strict=True):
        assert artifact(ours, "checkpoint")["digest"] == artifact(theirs, "checkpoint")["digest"]
    assert "update_policy" in made[1]["cached_stages"]
    assert artifact(made[4], "experience")["digest"] == experience["digest"]
    assert DAMAGED not in made[4]["cached_stages"]
    assert list((home / "store" / "damaged").iterdir())


@pytest.mark.thorough
def test_a_longer_run_goes_on_after_the_last_iteration(longer: FinishedRun) -> None:
    assert "continuing after iteration 4 of 8" in longer.output
    assert "epoch 0, prompt 128" in longer.output
    found = records(longer.home, "first")
    assert [record["iteration"] for record in found] == list(range(9))
    assert policy_bytes(longer.home, found[5]) != policy_bytes(longer.home, found[4])
    assert [record["lease"] for record in found] == [1, 1, 1, 1, 1, 2, 2, 2, 2]
    spec = json.loads((longer.home / "store" / "runs" / "first" / "spec.json").read_text())
    assert spec["update"]["decay_iterations"] == 4  # the schedule stays as it was


def test_a_known_run_refuses_another_spec(smoke: FinishedRun) -> None:
    before = records(smoke.home, "first")
    done = train(smoke.home, "first", "--set", "seed=1", "--set", "rollout.temperature=0.5")
    assert done.returncode == 2
    assert "rollout.temperature: 1.0 -> 0.5" in done.stderr
    assert "seed: 0 -> 1" in done.stderr
    assert records(smoke.home, "first") == before
