"""What any whole run's last record says follows from what it was made from, however the run came about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tasks.runs.fork import fork_run
from tasks.runs.fsck import check_run
from tasks.runs.record_chain import record_digest
from tasks.runs.run_state import committed, spec_of_run
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, killed

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("dataset.evaluation=null", "iterations=4")
SETTINGS = {
    "evaluated": ("evaluation.every=2", "iterations=3"),
    "never measured": (*SHORT, "registry.metric=policy/nothing"),
    "thin": (*SHORT, "checkpoint.every=3", "checkpoint.keep_last=1"),
    "overlapped": (*SHORT, "schedule=overlapped", "update.importance_correction=token"),
    "dynamic sampling": (
        *SHORT,
        "algorithm.kind=rloo",
        "rollout.samples_per_prompt=2",
        "rollout.dynamic_sampling.max_batches=3",
    ),
    "a price that adapts": (*SHORT, "algorithm.kind=kl_penalty_ppo"),
    "several epochs": (*SHORT, "rollout.prompts_per_iteration=40"),
    "not a number": (*SHORT, "registry.metric=policy/nan"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ppoflow keeps its state."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return tmp_path / "home"


def damages(name: str = "toy") -> list[str]:
    """What is said to be damaged."""
    return [damage.complaint for damage in check_run(name, lambda text: None).damages]


def noted_rollback(run: ToyRun, after: int) -> None:
    """What a process has noted that died before it took records out: the second rollback."""
    records = run.context().records
    note = {"run": "toy", "after": after, "attempt": {"number": 2, "rate_factor": 0.25}, "passed": []}
    records.note("rollbacks", note | {"follows": record_digest(records.read(after))})


def up_and_down(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """The best is amid them, and twice as good; iteration 3 diverges at full rates."""
    quality = {"policy/quality": [0.0, 1.0, 3.0, 2.0, 3.0, 0.5, 1.0][iteration], "policy/nan": math.nan}
    return quality | ({"kl/reference": 9.0} if iteration == 3 and rate_factor == 1 else {})


@pytest.mark.parametrize("settings", SETTINGS)
def test_of_a_run_after_each_iteration(home: Path, settings: str) -> None:
    run = ToyRun(home, SETTINGS[settings], engines=ToyEngines(up_and_down))
    for iteration in (1, 2, 4):
        run.train(f"iterations={iteration}")
        assert damages() == []


def test_of_a_run_whose_settings_change_on_the_way_and_of_its_forks(home: Path) -> None:
    run = ToyRun(home, SHORT, engines=ToyEngines(up_and_down))
    run.train()
    run.train("iterations=5", "registry.metric=policy/quality")
    assert (damages(), run.records()[-1].best.iteration) == ([], 4)
    fork_run("toy", 3, "new", ["advantages.kl.coef=0.7", "registry.metric=kl/reference"])
    assert damages("new") == []
    fork = ToyRun(home, name="new", engines=ToyEngines(up_and_down))
    fork.train(spec=spec_of_run("new"))
    fork_run("new", 4, "newer", ["rollout.prompts_per_iteration=6", "iterations=5"])
    assert (damages("new"), damages("newer")) == ([], [])
    ToyRun(home, name="newer", engines=ToyEngines(up_and_down)).train(spec=spec_of_run("newer"))
    assert damages("newer") == []


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ("update.eps=0.5", 2),
        ("evaluation.every=3", 2),
        ("evaluation.pass_score=0.5", 4),
        ("reward.function=reward.py:other", 4),
        ("rollout.max_response_tokens=7", 4),
        ("rollout.prompts_per_iteration=6", 2),
    ],
)
def test_of_a_fork_whose_best_is_one_of_those_that_were_measured_as_it_measures(
    home: Path, change: str, best: int
) -> None:
    ToyRun(home, (*SHORT, "registry.metric=policy/quality"), engines=ToyEngines(up_and_down)).train("iterations=3")
    fork_run("toy", 3, "new", [change, "iterations=6"])
    ToyRun(home, name="new", engines=ToyEngines(up_and_down)).train(spec=spec_of_run("new"))
    assert (damages("new"), [record.best.iteration for record in committed("new").records[3:]]) == (
        [],
        [2, best, best, best],
    )
    fork_run("new", 5, "back", ["reward.function=reward.py:correct", "iterations=6"])
    ToyRun(home, name="back", engines=ToyEngines(up_and_down)).train(spec=spec_of_run("back"))
    assert damages("back") == []


def test_of_a_run_that_was_rolled_back_or_died_amid_it(home: Path) -> None:
    settings = (*SHORT, "guards.max_kl=5", "guards.on_divergence=rollback", "iterations=6")
    run = ToyRun(home, settings, engines=ToyEngines(up_and_down))
    run.engines.before("update_policy", 5, killed)
    run.train_until_killed()
    assert damages() == []
    assert run.train()[-1].attempt == 1
    assert damages() == []
    noted_rollback(run, 4)
    assert damages() == []  # the records that it gives up are there yet
    run.train()
    assert [record.attempt for record in run.records()][-2:] == [2, 2]
    assert damages() == []


def test_of_a_store_that_was_moved(home: Path) -> None:
    run = ToyRun(home.parent / "before", SHORT, engines=ToyEngines(up_and_down))
    run.train()
    moved = run.copy(home, up_and_down)
    assert damages() == []
    moved.train("iterations=5")
    assert damages() == []
