"""prefect.yaml: what it deploys can be loaded, its forms say what the spec says, and refuse what the spec refuses."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.exceptions import ParameterTypeError
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.states import AwaitingRetry, Scheduled
from prefect.utilities.schema_tools import validate

from flows.ppo import ppo_training
from infra.runs.names import validate_run_name
from ppo_core.spec import DpoSpec, RewardModelSpec, RlhfSpec, RunSpec, SpecError
from tasks.prefect.automations import OURS, POOL, RESUMABLE
from tasks.prefect.deployment_params import name_of_run
from tests.tasks.run_contexts import ARITHMETIC, smoke_spec

ROOT = Path(__file__).parents[2]
HELPFUL = ROOT / "examples" / "helpful"
PROJECT = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS: list[dict[str, Any]] = PROJECT["deployments"]
SPEC: dict[str, Any] = DEPLOYMENTS[0]["parameters"]["spec"]


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    path, _, name = deployment["entrypoint"].partition(":")
    return load_flow_from_entrypoint(f"{ROOT / path}:{name}")


def full_name(deployment: dict[str, Any]) -> str:
    return f"{flow_of(deployment).name}/{deployment['name']}"


def schema() -> dict[str, Any]:
    return ppo_training.parameters.model_dump_for_openapi()


def test_what_is_deployed() -> None:
    assert [full_name(deployment) for deployment in DEPLOYMENTS] == [
        "ppo-training/arithmetic",
        "reward-model/helpful",
        "dpo/helpful",
        "rlhf/helpful",
        "evaluation/held-out",
        "promotion/champion",
        "rollback/champion",
        "verify-run/digests",
        "gc/store",
    ]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: str(deployment["entrypoint"]))
def test_each_says_what_it_is_and_has_parameters_that_fit(deployment: dict[str, Any]) -> None:
    assert deployment["description"]
    assert deployment["version"] == version("ppoflow")
    assert "ppoflow" in deployment["tags"]
    assert deployment["work_pool"]["name"] == POOL
    form = flow_of(deployment).parameters.model_dump_for_openapi()
    assert all(field.get("description") for field in form["properties"].values())
    given = deployment.get("parameters", {})
    missing = set(form.get("required", [])) - set(given)
    assert missing <= {"run"}  # only what nobody can guess
    assert validate(given, form, ignore_required=True) == []


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: str(deployment["entrypoint"]))
def test_schedules_are_off_until_somebody_switches_them_on(deployment: dict[str, Any]) -> None:
    schedules = deployment.get("schedules", [])
    assert all(schedule["active"] is False and schedule["slug"] for schedule in schedules)
    assert len({schedule["slug"] for schedule in schedules}) == len(schedules)


def test_training_has_a_cron_and_an_interval_one_slot_and_the_tag_of_the_automations() -> None:
    training = DEPLOYMENTS[0]
    assert [next(iter(schedule)) for schedule in training["schedules"]] == ["cron", "interval"]
    assert not any("concurrency_limit" in deployment for deployment in DEPLOYMENTS)  # a restarted server forgets it
    quiet = [full_name(deployment) for deployment in DEPLOYMENTS if "job_variables" not in deployment["work_pool"]]
    assert quiet == ["promotion/champion"]
    assert all(OURS in deployment["tags"] for deployment in DEPLOYMENTS)
    resumable = [full_name(deployment) for deployment in DEPLOYMENTS if RESUMABLE in deployment["tags"]]
    assert resumable == ["ppo-training/arithmetic", "reward-model/helpful", "dpo/helpful", "rlhf/helpful"]


def test_the_deployed_spec_is_that_of_the_demo() -> None:
    deployed = RunSpec.model_validate(SPEC)
    assert deployed.document() == RunSpec.from_yaml(ARITHMETIC / "demo.yaml").document()
    assert (ROOT / deployed.folder).samefile(ARITHMETIC)


def test_the_other_deployed_specs_are_those_of_the_files() -> None:
    for number, kind, file in (
        (1, RewardModelSpec, "reward_model.yaml"),
        (2, DpoSpec, "dpo.yaml"),
        (3, RlhfSpec, "rlhf.yaml"),
    ):
        deployed = kind.model_validate(DEPLOYMENTS[number]["parameters"]["spec"])
        assert deployed.document() == kind.from_yaml(HELPFUL / file).document()
        assert (ROOT / deployed.folder).samefile(HELPFUL)


def test_the_form_shows_every_section_with_descriptions_bounds_and_choices() -> None:
    definitions = schema()["definitions"]
    for section in RunSpec.model_fields:
        assert definitions["RunSpec"]["properties"][section]["description"]
    bare = [
        f"{name}.{key}"
        for name, definition in definitions.items()
        for key, field in definition.get("properties", {}).items()
        if name.endswith("Spec") and not field.get("description")
    ]
    assert bare == []
    assert definitions["RolloutSpec"]["properties"]["temperature"]["minimum"] == 0.01
    assert definitions["AdvantageSpec"]["properties"]["truncated"]["enum"] == ["terminal", "bootstrap", "mask"]
    assert definitions["AdvantageSpec"]["properties"]["kl"]["discriminator"]["propertyName"] == "kind"
    assert all(field.get("description") for field in schema()["properties"].values())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"iterations": 0}, "iterations"),
        ({"iterations": "5"}, "iterations"),
        ({"seed": -1}, "seed"),
        ({"name": "../evil"}, "name"),
        ({"guards": {"on_divergence": "explode"}}, "on_divergence"),
        ({"promotion": {"confidence": 1.5}}, "confidence"),
        ({"rollout": {"max_tokens": 4}}, "max_tokens"),
    ],
)
def test_the_server_refuses_what_a_fields_own_rules_refuse(change: dict[str, Any], field: str) -> None:
    assert validate({"spec": SPEC}, schema()) == []
    errors = validate({"spec": {**SPEC, **change}}, schema())
    assert field in " ".join(f"{list(error.absolute_path)} {error.message}" for error in errors)


@pytest.mark.usefixtures("prefect_server")
def test_what_only_the_spec_knows_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    with pytest.raises(SpecError, match=r"update\.num_minibatches=7 does not divide the 32 responses"):
        ppo_training(smoke_spec(), overrides=["update.num_minibatches=7"])
    with pytest.raises(SpecError, match="did you mean max_response_tokens"):
        ppo_training(smoke_spec(), overrides=["rollout.max_tokens=7"])
    whole = {**SPEC, "update": {"num_minibatches": 7}}
    with pytest.raises(ParameterTypeError, match=r"update\.num_minibatches=7 does not divide the 256 responses"):
        ppo_training(whole)
    assert not (tmp_path / "home").exists()


@pytest.mark.usefixtures("prefect_server")
def test_a_run_is_named_by_its_scheduled_start_and_told_apart_from_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of_run("demo") == "demo"
    start = datetime(2026, 1, 5, 6, 0, 7, tzinfo=UTC)
    names = []
    with get_client(sync_client=True) as client:
        deployed = client.create_deployment(client.create_flow(ppo_training), "named")
        for _ in range(2):
            made = client.create_flow_run_from_deployment(deployed, state=Scheduled(scheduled_time=start))
            monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(made.id))  # as a worker does
            names.append(name_of_run("demo"))
            again = client.set_flow_run_state(made.id, AwaitingRetry(), force=True)
            assert again.status.value == "ACCEPT"
            assert name_of_run("demo") == names[-1] == f"demo-20260105-060007-{str(made.id)[:4]}"
            longest = name_of_run("x" * 100)
            assert longest == f"{'x' * 79}-20260105-060007-{str(made.id)[:4]}"
            assert validate_run_name(longest) == longest
    assert names[0] != names[1]
