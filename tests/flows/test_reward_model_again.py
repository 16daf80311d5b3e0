"""`ppoflow reward-model` of a name that another process works on, or that has another model already."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.artifacts import open_store
from infra.backend import acquire_lease
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
