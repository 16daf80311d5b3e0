"""The whole way on toy engines: each stage is done, and killed anywhere it goes on to the same bytes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import run_flow
from prefect.states import AwaitingRetry, Pending, Running
from typer.testing import CliRunner

from flows.cli import app
from flows.ppo import ppo_training
from flows.rlhf import RlhfReport, rlhf
from infra.backend import acquire_lease
from infra.process_identity import this_process
from ppo_core.records import InputError
from ppo_core.spec import RlhfSpec
from ppo_core.spec.rlhf import POLICY
from tasks.checks.rlhf import check_rlhf
from tasks.prefect.crashed_runs import FLOW_RUN
from tasks.runs.retention import find_garbage, remove_garbage
from tasks.stages.holding import REWARD_MODEL, RLHF, lease_name
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_reward_models import MADE, toy_engines
from tests.tasks.toy_runs import Killed, killed, stored_record

pytestmark = pytest.mark.usefixtures("prefect_server")
HELPFUL = Path(__file__).parents[2] / "examples" / "helpful"
SMALL = ("run.iterations=2", "run.evaluation.every=1", "run.evaluation.num_prompts=20")
FROM_POLICY = f"reward_model.model={{path: {POLICY}, config: null}}"
ALONE = [job.__name__ for job in MADE]


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database of MLflow's for all of them: to make one takes longer than a run."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def home(tmp_path: Path, tracking: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPOFLOW_TRACKING_URI", tracking)
    return tmp_path / "home"


@pytest.fixture
def toys(home: Path, monkeypatch: pytest.MonkeyPatch) -> ToyEngines:
    return toy_engines(monkeypatch)


def spec(*overrides: str) -> RlhfSpec:
    return RlhfSpec.from_yaml(HELPFUL / "rlhf.yaml", [*SMALL, *overrides])


def made(home: Path, run: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The reward model's files and what each iteration made, by digests."""
    folder = home / "runs" / run / "reward-model"
    weights = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    weights.pop("manifest.json")  # it tells when it was copied
    records = [stored_record(path) for path in sorted((home / "store" / "runs" / run / "iterations").glob("*.json"))]
    return weights, [{stage: ref.digest for stage, ref in record.artifacts.items()} for record in records]


def parts_of(id: UUID) -> list[tuple[str, FlowRun]]:
    """The flow runs below one, each with the name of its flow."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id={"any_": [id]}))
        return [(client.read_flow(run.flow_id).name, run) for run in found]


def test_it_does_all_stages_and_each_is_a_flow_run_below_it(home: Path, toys: ToyEngines) -> None:
    report = rlhf(spec(), "all")
    assert isinstance(report, RlhfReport)
    assert report.complaints == []
    assert report.training.policy is not None
    assert report.evaluation is not None
    assert report.evaluation.policy == f"models:/helpful/{report.training.policy.version}"
    assert report.promotion is not None
    assert report.promotion.moved is not None
    assert report.reward_model_folder == home / "runs" / "all" / "reward-model"
    assert [toys.count(job) for job in (*ALONE, "finetune_policy", "update_policy")] == [1, 1, 1, 1, 2]
    with get_client(sync_client=True) as client:
        ours = FlowRunFilter(name={"any_": ["all"]}), FlowFilter(name={"any_": ["rlhf"]})
        (whole,) = client.read_flow_runs(flow_run_filter=ours[0], flow_filter=ours[1])
    assert whole.state_name == "Completed"
    parts = dict(parts_of(whole.id))
    assert len(parts_of(whole.id)) == 4
    assert set(parts) == {"reward-model", "ppo-training", "evaluation", "promotion"}
    assert {run.state_name for run in parts.values()} == {"Completed"}
    assert set(parts["reward-model"].tags) == {"ppoflow", "all", "helpful-reward-model"}


KILLS = {
    "of its own": [("evaluate_reward_model", 1), ("update_policy", 2)],
    "from the policy": [
        ("finetune_policy", 1),
        ("train_reward_model", 1),
        ("evaluate_reward_model", 1),
        ("score_rollouts", 2),
        ("update_policy", 1),
        ("score_evaluation", 1),
    ],
}
"""In each process before so many such jobs, by what the reward model starts from."""


@pytest.mark.thorough
@pytest.mark.parametrize("start", KILLS)
def test_killed_again_and_again_it_ends_with_the_same_bytes(
    home: Path, toys: ToyEngines, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    asked = spec(*([FROM_POLICY] if start == "from the policy" else []), "promote=false", "evaluate=false")
    rlhf(asked, "same")
    whole, done = made(home, "same"), Counter(toys.done)
    shutil.rmtree(home)
    again = toy_engines(monkeypatch)
    for job, number in KILLS[start]:
        again.before(job, number, killed)
        with pytest.raises(Killed):
            rlhf(asked, "same")
    rlhf(asked, "same")
    assert made(home, "same") == whole
    once = (*ALONE, "finetune_policy", "update_policy")
    assert {job: again.count(job) for job in once} == {job: done[job] for job in once}


def test_it_goes_on_where_only_the_store_is_left_with_its_home_at_the_same_place(
    home: Path, toys: ToyEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPOFLOW_STORE", str(tmp_path / "store"))
    asked = spec("promote=false", "evaluate=false")
    toys.before("update_policy", 2, killed)
    with pytest.raises(Killed):
        rlhf(asked, "moved")
    shutil.rmtree(home)
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match=rf"its own models lie below PPOFLOW_HOME={home}: set it so here too"):
        rlhf(asked, "moved")
    monkeypatch.setenv("PPOFLOW_HOME", str(home))
    rlhf(asked, "moved")
    assert toys.count("update_policy") == 2


def test_what_ppo_starts_from_stays_while_the_reward_model_trains(home: Path, toys: ToyEngines) -> None:
    """No record names it yet, and a run of PPO that had to make it again might come to another one."""
    toys.before("train_reward_model", 1, lambda: remove_garbage(find_garbage()))
    rlhf(spec(FROM_POLICY, "promote=false", "evaluate=false"), "kept")
    assert [toys.count(job) for job in ("finetune_policy", "start_policy")] == [1, 1]


def test_the_reward_model_is_what_ppo_scores_with(home: Path, toys: ToyEngines) -> None:
    rlhf(spec("promote=false", "evaluate=false"), "wired")
    document = json.loads((home / "store" / "runs" / "wired" / "spec.json").read_text())
    model, gold = document["reward"]["sources"]
    assert model["path"] == str(home / "runs" / "wired" / "reward-model")
    assert (model["name"], gold["function"]) == ("learned", "generate.py:gold")


def test_the_critic_begins_as_the_reward_model_once_that_is_there(home: Path, toys: ToyEngines) -> None:
    wired = "run.model.critic=<reward_model>"
    rlhf(spec(FROM_POLICY, wired, "promote=false", "evaluate=false"), "valued")
    document = json.loads((home / "store" / "runs" / "valued" / "spec.json").read_text())
    assert document["model"]["critic"] == str(home / "runs" / "valued" / "reward-model")
    assert toys.count("finetune_policy") == 1
    assert [job for job in toys.done if job in ("start_policy", "train_reward_model")] == [
        *("start_policy", "train_reward_model", "start_policy")
    ]


def test_the_reward_model_can_start_from_the_policy_that_was_fine_tuned(home: Path, toys: ToyEngines) -> None:
    rlhf(spec(FROM_POLICY, "promote=false", "evaluate=false"), "onward")
    assert toys.count("finetune_policy") == toys.count("start_policy") == 1
    assert toys.done.index("finetune_policy") < toys.done.index("train_reward_model")
    first = stored_record(home / "store" / "runs" / "onward" / "iterations" / "000000.json").checkpoint
    policy = (home / "store" / "checkpoint" / first.key / "policy" / "model.safetensors").read_text()
    assert (home / "runs" / "onward" / "start-policy" / "model.safetensors").read_text() == policy


@pytest.mark.thorough
def test_a_flow_run_of_a_deployment_that_crashed_goes_on_as_the_same_one(home: Path, toys: ToyEngines) -> None:
    document = {"spec": spec("promote=false").model_dump(mode="json"), "run": "deployed", "wait": True}
    toys.before("update_policy", 2, killed)
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(rlhf), "rlhf", enforce_parameter_schema=False)
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=document)
        with pytest.raises(Killed):
            run_flow(rlhf, flow_run=client.read_flow_run(flow_run.id))
        client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)
        report = run_flow(rlhf, flow_run=client.read_flow_run(flow_run.id))
        found = client.read_flow_run(flow_run.id)
    assert (found.state_name, found.run_count) == ("Completed", 2)
    assert report.training.iterations == 2
    states = Counter((flow, run.state_name) for flow, run in parts_of(flow_run.id))
    assert states["ppo-training", "Crashed"] == states["ppo-training", "Completed"] == 1
    assert toys.count("train_reward_model") == 1


@pytest.mark.parametrize("flow", [RLHF, pytest.param(REWARD_MODEL, marks=pytest.mark.thorough)])
def test_the_page_of_a_process_that_died_says_so(home: Path, toys: ToyEngines, flow: str) -> None:
    with get_client(sync_client=True) as client:
        died = client.create_flow_run(ppo_training, parameters={}, name="died", state=Pending()).id
        client.set_flow_run_state(died, Running(), force=True)
        dead = this_process().model_copy(update={"started": 1})
        acquire_lease(home / "store", lease_name(flow, "page"), note={FLOW_RUN: str(died)}, identity=dead)
        rlhf(spec("promote=false", "evaluate=false"), "page")
        assert client.read_flow_run(died).state_name == "Crashed"


def test_a_check_looks_at_all_stages_and_starts_nothing(home: Path, toys: ToyEngines) -> None:
    found = check_rlhf(spec(), "new")
    assert found.notes == []
    assert found.good["stages"] == "SFT, reward model, PPO, evaluation, promotion"
    assert found.good["pairs"] == "40 rows (40 pairs) to train on, 10 (10) held out"
    assert found.good["run"] == "new, a new run of 2 iterations"
    assert found.good["reward"].endswith("; tried once the reward model is trained")
    assert not home.exists()
    assert set(toys.done) == {"check_run", "check_preferences"}
    told = CliRunner().invoke(app, ["check", str(HELPFUL / "reward_model.yaml")])
    assert told.exit_code == 0, told.output
    assert "helpful-reward-model, a new reward model" in told.stdout
    with pytest.raises(InputError, match=r"there is no folder .*/nowhere: .*, in given.reward_model$"):
        check_rlhf(spec("given.reward_model=nowhere"), "new")
    with pytest.raises(InputError, match=r"there is no folder .*/nowhere: .*, in given.policy$"):
        check_rlhf(spec("given.policy=nowhere"), "new")


def test_status_tells_of_the_reward_model_before_there_is_an_iteration(home: Path, toys: ToyEngines) -> None:
    said: list[str] = []

    def ask() -> None:
        said.append(CliRunner().invoke(app, ["status", "told"]).stdout)

    for job in ("train_reward_model", "finetune_policy"):
        toys.before(job, 1, ask)
    rlhf(spec("promote=false", "evaluate=false"), "told")
    during, after = said
    assert "run told: no iteration is committed yet" in during
    assert "doing now          train_reward_model" in during
    assert f"reward model       {home / 'runs' / 'told' / 'reward-model'}" in after
    assert "doing now          finetune_policy" in after
