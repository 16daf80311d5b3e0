"""What people are told of a run that is somewhere else than it was, or whose folder on this machine is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.artifacts import ArtifactCorrupted
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.policies.sample_policy import policy_folder
from tasks.register_policy import export_best
from tasks.reports.summary import interrupted
from tests.tasks.toy_runs import ToyRun, flip_a_bit

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("iterations=2", "dataset.evaluation=null")


@pytest.mark.parametrize("command", ["fsck", "gc"])
def test_a_store_that_has_nothing_is_not_called_intact(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "typo"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    told = CliRunner().invoke(app, [command])
    assert told.exit_code == 2
    assert (
        f"{tmp_path}/typo/store has no run and no artifact: set PPOFLOW_STORE (or PPOFLOW_HOME) to where" in told.output
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """A finished run, whose state was then moved."""
    made = ToyRun(tmp_path / "old", SHORT)
    made.train()
    shutil.move(tmp_path / "old", tmp_path / "moved")
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "moved"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return ToyRun(tmp_path / "moved", SHORT)


def test_status_names_the_place_where_the_checkpoint_is_now(run: ToyRun) -> None:
    told = CliRunner().invoke(app, ["status", "toy"])
    assert told.exit_code == 0
    (line,) = [line for line in told.output.splitlines() if "checkpoint " in line]
    assert str(run.home / "store" / "checkpoint") in line
    assert "/old/" not in told.output


def test_an_interrupted_run_of_which_only_the_store_is_left_has_its_iterations(run: ToyRun) -> None:
    shutil.rmtree(run.home / "runs")
    told = interrupted("toy", "ppoflow resume toy")
    assert "no iteration was committed yet" not in told
    assert f"iteration 2 is the last that is committed, in {run.home / 'store'}" in told
    assert "no iteration was committed yet" in interrupted("another", "ppoflow resume another")


def test_asking_a_damaged_copy_of_the_best_policy_is_refused(run: ToyRun) -> None:
    folder = export_best(run.context(), run.records()[-1].best)
    (folder / "config.json").write_text("{}")
    (folder / "manifest.json").unlink()
    assert policy_folder(str(folder), Settings()) == folder  # somebody's own folder
    own_code = {"AutoModelForSequenceClassification": "modeling.Scores", "AutoModelForCausalLM": "modeling.Answers"}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Answers"], "auto_map": own_code}))
    assert policy_folder(str(folder), Settings()) == folder
    (folder / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(
        InputError, match="is a sequence classifier, such as a reward model: only a policy can be sampled"
    ):
        policy_folder(str(folder), Settings())
    (folder / "config.json").unlink()
    folder = export_best(run.context(), run.records()[-1].best)
    flip_a_bit(folder)
    (folder / "config.json").touch()
    with pytest.raises(ArtifactCorrupted, match="best-policy is damaged"):
        policy_folder(str(folder), Settings())


def test_a_copy_of_the_best_policy_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, ("iterations=2", "dataset.evaluation=null", "registry.metric=policy/quality"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/toy").write_text("")  # so the folder for the copy cannot be made
    assert [record.best.iteration for record in run.train()] == [0, 1, 2]
    assert run.said.count("! the best policy could not be copied to the run's folder: ") == 1


def test_any_iteration_of_a_run_can_be_asked(run: ToyRun) -> None:
    records = run.records()
    asked = [policy_folder(f"toy@{number}", Settings()) for number in range(3)]
    assert asked == [run.place(record.checkpoint) / "policy" for record in records]
    assert policy_folder("toy", Settings()) == asked[records[-1].best.iteration]
    with pytest.raises(InputError, match=r"run toy has no iteration 9: it has 0\.\.2"):
        policy_folder("toy@9", Settings())
    with pytest.raises(InputError, match=r"'toy@best' does not name a policy: write .* RUN or RUN@ITERATION"):
        policy_folder("toy@best", Settings())


def test_where_averages_are_evaluated_the_average_is_exported_registered_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    plain, averaged = (
        ToyRun(tmp_path, ("iterations=2", "update.ema_decay=0.5", *more), name)
        for name, more in {"plain": (), "averaged": ("evaluation.weights=ema",)}.items()
    )
    evaluated = [run.train()[-1].evaluation for run in (plain, averaged)]
    assert evaluated[0] is not None
    assert evaluated[1] is not None
    assert plain.policies() == averaged.policies()
    assert evaluated[0].digest != evaluated[1].digest
    best = averaged.records()[-1].best
    ema = (averaged.place(best.checkpoint) / "ema/model.safetensors").read_text()
    assert (export_best(averaged.context(), best) / "model.safetensors").read_text() == ema
    assert policy_folder("averaged", Settings()) == averaged.place(best.checkpoint) / "ema"
    assert policy_folder("plain", Settings()).name == "policy"
    assert (averaged.place(best.checkpoint) / "ema/MLmodel").is_file()
