"""A run that cannot start: nothing is left of it, and under a deployment its page says why in plain words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ParameterTypeError
from prefect.flow_engine import run_flow
from typer.testing import CliRunner

from flows.cli import app
from flows.ppo import ppo_training
from ppo_core.records import InputError
from tests.tasks.run_contexts import ARITHMETIC, smoke_spec

SMOKE = str(ARITHMETIC / "smoke.yaml")
SMALL_HEADS = "model.config.num_attention_heads=8"
REFUSAL = "the model's attention heads have a size (head_dim) of 16, and vLLM on CPU takes only 32, 64"
AGAIN = {"run": "zz", "rerun": {"iteration": 2, "start": "score"}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.usefixtures("shared_engine")
@pytest.mark.parametrize("command", ["check", "train"])
def test_what_vllm_would_refuse_ends_the_command_before_anything_starts(command: str, home: Path) -> None:
    result = CliRunner().invoke(app, [command, SMOKE, "--set", SMALL_HEADS])
    assert result.exit_code == 2
    assert "Prefect" not in result.stdout
    assert result.stderr.startswith(f"InputError: {REFUSAL}")
    assert not home.exists()


@pytest.mark.usefixtures("shared_engine")
def test_a_check_says_what_it_found_and_starts_nothing(home: Path) -> None:
    result = CliRunner().invoke(app, ["check", SMOKE, "--run", "first"])
    assert result.exit_code == 0, result.output
    subjects = [line.partition(" ")[0] for line in result.stdout.splitlines()]
    assert subjects == ["run", "data", "context", "model", "rollouts", "reward", "state", "store", "checked"]
    assert "first, a new run of 4 iterations" in result.stdout
    assert "longest prompt 12 + response 48 = 60 tokens; the model reads 128 tokens" in result.stdout
    assert f"{home}/store" in result.stdout
    assert not home.exists()


@pytest.mark.usefixtures("prefect_server", "shared_engine")
def test_called_in_python_a_refused_run_has_no_flow_run(home: Path) -> None:
    with get_client(sync_client=True) as client:
        before = len(client.read_flow_runs())
        with pytest.raises(InputError, match="vLLM on CPU takes only"):
            ppo_training(smoke_spec(SMALL_HEADS))
        assert len(client.read_flow_runs()) == before
    assert not home.exists()


def deployed(client: SyncPrefectClient, parameters: dict[str, Any]) -> Any:
    """A flow run of a deployment, done as a worker's process does it; as the server has it afterwards."""
    deployment = client.create_deployment(client.create_flow(ppo_training), "refused", enforce_parameter_schema=False)
    made = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    with pytest.raises((InputError, ParameterTypeError)):
        run_flow(ppo_training, flow_run=made)
    return client.read_flow_run(made.id)


@pytest.mark.usefixtures("prefect_server", "shared_engine")
@pytest.mark.parametrize(
    ("asked", "broken", "message"),
    [
        ({"overrides": [SMALL_HEADS]}, False, f"InputError: {REFUSAL}"),
        ({}, True, "model.dtype=bfloat16 with training.zero_stage=0 keeps no fp32 master weights"),
        (AGAIN, False, "InputError: there is no run zz in"),
    ],
    ids=["by the check", "by the spec", "a rerun of no run"],
)
def test_under_a_deployment_it_fails_with_the_message_and_no_traceback(
    home: Path, asked: dict[str, Any], broken: bool, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = smoke_spec().model_dump(mode="json")
    if broken:
        spec["model"]["dtype"], spec["training"]["zero_stage"] = "bfloat16", 0
    with get_client(sync_client=True) as client:
        run = deployed(client, {"spec": spec, **asked})
    assert run.state_name == "Failed"
    assert message in run.state.message
    assert message in caplog.text
    assert "Traceback" not in caplog.text + run.state.message
    assert "prompts_per_iteration" not in caplog.text  # not all parameters either
    assert not home.exists()
