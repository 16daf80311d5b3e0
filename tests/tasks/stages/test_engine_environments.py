"""No engine holds a key of the team's: neither in the environment that it is started with, nor in its guardian's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.engines.process import EngineProcess
from infra.settings import Settings
from ppo_core.processes.permissions import Permissions, permissions_of
from ppo_core.records import InputError
from tasks.checks.try_reward import try_reward
from tasks.prepare_dataset import prepare_dataset
from tasks.stages.engine_programs import (
    launch,
    launch_on_node,
    plan_engines,
    rollout_environment,
    scoring_permissions,
    training_environment,
)
from tasks.stages.engines import Engines
from tests.e2e.launch import wait_for
from tests.tasks.run_contexts import run_context, smoke_spec, stored_files

CANARY = "canary"
SECRETS = {
    **{"PREFECT_API_AUTH_STRING": f"admin:{CANARY}", "PREFECT_API_KEY": CANARY, "PREFECT_PROFILES_PATH": CANARY},
    **{"MLFLOW_TRACKING_USERNAME": CANARY, "MLFLOW_TRACKING_PASSWORD": CANARY, "MLFLOW_TRACKING_TOKEN": CANARY},
    **{"AWS_ACCESS_KEY_ID": CANARY, "AWS_SECRET_ACCESS_KEY": CANARY, "AWS_SESSION_TOKEN": CANARY},
    **{"AWS_SHARED_CREDENTIALS_FILE": f"/{CANARY}", "AWS_PROFILE": CANARY, "PGPASSFILE": f"/{CANARY}"},
    **{"RAY_AUTH_TOKEN": CANARY, "RAY_AUTH_TOKEN_PATH": f"/{CANARY}", "PPOFLOW_MLFLOW_CREDENTIALS": f"/{CANARY}"},
    **{"HF_TOKEN": CANARY, "HF_TOKEN_PATH": f"/{CANARY}", "HUGGING_FACE_HUB_TOKEN": CANARY, "VLLM_API_KEY": CANARY},
    **{"OPENAI_API_KEY": CANARY, "MY_SECRET": CANARY, "DATABASE": f"postgresql://me:{CANARY}@db/x"},
    **{"HTTPS_PROXY": f"http://me:{CANARY}@proxy:3128", "HF_ENDPOINT": f"https://me:{CANARY}@hub"},
}
NEEDED = {"OMP_PLACES": "cores", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false"}
REWARD = """
import os
from pathlib import Path

def right(prompts, completions, **columns):
    seen = [Path(f"/proc/{pid}/environ").read_text() for pid in (os.getpid(), os.getppid())]
    text = "\\0".join([*seen, *(f"{name}={value}" for name, value in os.environ.items())])
    (Path(__file__).parent / "seen").write_text(text)
    return [float(number % 2) for number in range(len(prompts))]
"""


@pytest.fixture(autouse=True)
def _a_team_member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of somebody who may do everything."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_REWARD_ENV", raising=False)
    for name, value in {**SECRETS, **NEEDED}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    """A user's reward function, which writes down all that it sees."""
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "reward.py"


def scored(reward: Path, settings: Settings) -> dict[str, str]:
    """What the function saw in the scoring engine of a run: its own environment, and its guardian's."""
    home = reward.parent
    spec = smoke_spec(f"reward.function={reward}:right")
    engines = Engines(spec, settings, home / "logs")
    try:
        prepare_dataset.fn(run_context(spec, home, engines=engines))
    finally:
        engines.close()
    return variables((home / "seen").read_text())


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def leaked(seen: dict[str, str]) -> list[str]:
    return sorted(name for name, value in seen.items() if CANARY in value or name in SECRETS)


@pytest.mark.thorough
def test_a_reward_function_sees_none_of_the_teams_keys(reward: Path, tmp_path: Path) -> None:
    seen = scored(reward, Settings(home=tmp_path, plugins=(str(tmp_path), ".")))
    assert leaked(seen) == []
    assert seen.items() >= {name: NEEDED[name] for name in NEEDED}.items()
    assert {"PATH", "HOME"} <= set(seen)


@pytest.mark.thorough
def test_it_sees_what_the_owner_passes_on_and_nothing_else(reward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_REWARD_ENV", "OPENAI_API_KEY, HTTPS_PROXY")
    monkeypatch.setenv("PPOFLOW_PLUGINS", f".,{reward.parent}")
    assert leaked(scored(reward, Settings())) == ["HTTPS_PROXY", "OPENAI_API_KEY"]
    (reward.parent / "seen").unlink()
    try_reward(smoke_spec(f"reward.function={reward}:right"), [])
    assert leaked(variables((reward.parent / "seen").read_text())) == ["HTTPS_PROXY", "OPENAI_API_KEY"]


def test_what_the_owner_permits_reaches_the_scoring_engine_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert permissions_of(scoring_permissions(Settings())) == Permissions()
    monkeypatch.setenv("PPOFLOW_PLUGINS", ".,rewards")
    monkeypatch.setenv("PPOFLOW_RUN_GENERATED_CODE", "1")
    monkeypatch.setenv("PPOFLOW_REWARD_URLS", "http://rewards:8100, https://judge")
    servers = ("http://rewards:8100", "https://judge")
    expected = Permissions((".", "rewards"), run_generated_code=True, reward_urls=servers)
    assert permissions_of(scoring_permissions(Settings())) == expected


def test_a_name_that_is_not_set_is_refused_before_any_work(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, reward_env=("OPENAI_API_KEY", "NOT_HERE"))
    with pytest.raises(InputError, match="PPOFLOW_REWARD_ENV names NOT_HERE, which is not set here: export it"):
        Engines(smoke_spec(), settings, tmp_path / "logs")
    assert stored_files(tmp_path) == []


def engine_makers(tmp_path: Path) -> Iterator[tuple[str, Callable[[], EngineProcess]]]:
    """Every kind of engine: on this machine, and as an actor of Ray starts it on a node."""
    spec = smoke_spec("engines.rollout_engines=2", "training.num_ranks=2")
    settings = Settings(home=tmp_path, reward_env=("OPENAI_API_KEY",))
    for plan in plan_engines(spec).values():
        yield plan.name, partial(launch, plan, settings, tmp_path / "logs")
        yield f"{plan.name} on a node", partial(launch_on_node, "node", plan=plan, run="run", threads=1)


def is_engine(command: list[str]) -> bool:
    """And not its guardian, which has the engine's command behind its own."""
    return "ppo_core.engines" in " ".join(command[:3])


def started(open_engine: Callable[[], EngineProcess], processes: int) -> list[tuple[str, dict[str, str]]]:
    """An engine's processes, with the environment of each: its guardian first. The engine ends at once."""
    before = {child.pid for child in psutil.Process().children()}
    engine = open_engine()
    engine.start()
    try:
        (guardian,) = [child for child in psutil.Process().children() if child.pid not in before]

        found: list[tuple[str, dict[str, str]]] = []

        def are_all_there() -> bool:
            with suppress(psutil.NoSuchProcess):  # a tool that an engine asked about the machine
                seen = [(one.cmdline(), one.environ()) for one in (guardian, *guardian.children(recursive=True))]
                ours = [(" ".join(words), environment) for words, environment in seen if is_engine(words)]
                found[:] = [(" ".join(seen[0][0]), seen[0][1]), *ours]
            return len(found) == 1 + processes

        wait_for(are_all_there, "the engine's processes")
        return found
    finally:
        engine.close()


@pytest.mark.thorough
def test_no_kind_of_engine_has_a_key(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    for name, open_engine in engine_makers(tmp_path):
        found = started(open_engine, 2 if "training" in name else 1)
        counts[name] = len(found)
        for command, environment in found:
            expected = ["OPENAI_API_KEY"] if name == "scoring" else []
            assert leaked(environment) == expected, (name, command)
            assert environment["PATH"] == os.environ["PATH"]
    assert counts == {
        **{"scoring": 2, "scoring on a node": 2, "training": 3, "training on a node": 3},
        **{"rollout": 2, "rollout on a node": 2, "rollout-2": 2, "rollout-2 on a node": 2},
    }


@pytest.mark.parametrize(
    ("policy", "shared", "expected"),
    [(None, False, None), (None, True, "passive"), ("passive", False, "passive"), ("active", True, "active")],
)
def test_engines_spin_only_where_they_have_the_cores(
    monkeypatch: pytest.MonkeyPatch, policy: str | None, *, shared: bool, expected: str | None
) -> None:
    monkeypatch.delenv("PPOFLOW_ENGINE_WAIT_POLICY", raising=False)
    settings = Settings() if policy is None else Settings(engine_wait_policy=policy)
    given = [
        training_environment(settings, num_ranks=2 if shared else 1),
        training_environment(settings, num_ranks=1, accompanied=shared),
        rollout_environment(settings, accompanied=shared),
    ]
    assert [environment.get("OMP_WAIT_POLICY") for environment in given] == [expected] * 3


@pytest.mark.parametrize(
    ("changes", "shared"),
    [([], False), (["engines.rollout_engines=2"], True)],
)
def test_several_rollout_engines_share_the_cores(changes: list[str], *, shared: bool) -> None:
    plans = plan_engines(smoke_spec(*changes))
    assert {plan.accompanied for plan in plans.values() if plan.role == "rollout"} == {shared}
    assert not plans["training"].accompanied


@pytest.mark.thorough
@pytest.mark.parametrize("switch", ["true", "false"])
def test_updates_of_a_time_with_the_other_setting_can_be_done_again(switch: str, tmp_path: Path) -> None:
    """Torch takes no deterministic cuBLAS without it, and a replayed update is as deterministic as at its time."""
    plan = plan_engines(smoke_spec(f"engines.deterministic={switch}"))["training"]
    (_, (_, environment)) = started(partial(launch, plan, Settings(), tmp_path), 1)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.thorough
def test_the_training_engine_is_told_that_its_reference_rests_in_main_memory(tmp_path: Path) -> None:
    plan = plan_engines(smoke_spec("engines.offload_reference=true"))["training"]
    (_, (command, _)) = started(partial(launch, plan, Settings(), tmp_path), 1)
    assert command.endswith("--offload-reference")


def test_memory_does_not_grow_with_every_size_of_a_microbatch() -> None:
    """oneDNN's own default is 1024 shapes."""
    assert training_environment(Settings(), num_ranks=1)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
