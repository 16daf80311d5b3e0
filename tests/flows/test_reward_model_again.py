"""`ppoflow reward-model` and `dpo` of a name that another process works on, or that has another model already."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.artifacts import open_store
from infra.backend import acquire_lease
from infra.mlflow.client import open_client
from infra.settings import Settings
from tasks.stages.holding import REWARD_MODEL, lease_name
from tests.tasks.toy_reward_models import toy_engines

SPEC = Path(__file__).parents[2] / "examples" / "helpful" / "reward_model.yaml"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return tmp_path / "home"


def train(*changes: str) -> tuple[int, str]:
    """Exit status, and what is said."""
    done = CliRunner().invoke(app, ["reward-model", str(SPEC), "--run", "mine", *changes])
    return done.exit_code, " ".join(done.output.split())


def test_a_second_process_is_refused_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.reward_model.reward_model.checked", lambda *_: pytest.fail("it began"))
    lease = acquire_lease(open_store(Settings().store_root).root, lease_name(REWARD_MODEL, "mine"))
    try:
        status, said = train()
    finally:
        lease.release()
    assert status == 2
    assert "LeaseHeld: reward-model mine: process " in said
    assert "or use --wait, and this command waits for it" in said


@pytest.mark.usefixtures("prefect_server")
def test_another_model_in_the_folder_of_the_name_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_engines(monkeypatch)
    told = f"! {home}/runs/mine/reward-model had another model of this run, "
    for changes, other in [((), False), ((), False), (("--set", "fit.num_steps=41"), True)]:
        status, said = train(*changes)
        assert (status, told in said) == (0, other), said


@pytest.mark.usefixtures("prefect_server")
def test_each_model_of_the_name_has_an_mlflow_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one they would share curves and figures; the same training again has the same one."""
    toy_engines(monkeypatch)
    for changes in ((), ("--set", "fit.num_steps=41"), ("--set", "engines.timeout_s=1000"), ()):
        status, said = train(*changes)
        assert status == 0, said
    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()], "tags.`ppoflow.run` = 'mine'")
    assert sorted(run.data.params["fit.num_steps"] for run in runs) == ["200", "41"]
    points = [client.get_metric_history(run.info.run_id, "reward_model/accuracy") for run in runs]
    assert [len(found) for found in points] == [1, 1]
