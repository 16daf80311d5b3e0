"""The whole way on toy engines: what is given is not made, and stays; no registry at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.rlhf import rlhf
from ppo_core.records import InputError
from tasks.checks.rlhf import check_rlhf
from tasks.runs.errors import RegistryError
from tests.flows.test_rlhf import ALONE, HELPFUL, made, spec
from tests.tasks.toy_engines import ToyEngines

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("prefect_server")]
SHORT = ("promote=false", "evaluate=false")


def away(*_: object, **__: object) -> NoReturn:
    raise RegistryError("the registry is away")


def test_without_a_registry_all_is_done_and_registered_the_next_time(
    home: Path, toys: ToyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for place in ("tasks.register_policy", "tasks.preferences.register_reward_model"):
            patch.setattr(f"{place}.register", away)
        report = rlhf(spec(*SHORT), "alone")
    assert report.reward_model is not None
    assert (report.training.policy, report.reward_model.version) == (None, None)
    assert len(report.complaints + report.reward_model.complaints) > 0
    assert (home / "runs/alone/best-policy/model.safetensors").is_file()
    trained = {job: toys.count(job) for job in ("train_reward_model", "update_policy")}
    again = rlhf(spec(*SHORT), "alone")
    assert again.training.policy is not None
    assert again.reward_model is not None
    assert again.reward_model.version is not None
    assert {job: toys.count(job) for job in trained} == trained


def test_a_run_does_not_go_on_from_another_policy(home: Path, toys: ToyEngines) -> None:
    first, second = (rlhf(spec(*SHORT, f"run.seed={seed}"), f"seed-{seed}").training.policy for seed in (1, 2))
    assert first is not None
    assert second is not None
    given = [f"given={{policy: models:/{one.name}/{one.version}}}" for one in (first, second)]
    rlhf(spec(*SHORT, given[0]), "onward")
    start = home / "runs/onward/start-policy/model.safetensors"
    before = start.read_bytes()
    with pytest.raises(InputError, match=r"run onward has begun from the policy .* choose another --run name"):
        rlhf(spec(*SHORT, given[1]), "onward")
    assert start.read_bytes() == before


def test_a_run_does_not_go_on_with_another_reward_model(home: Path, toys: ToyEngines) -> None:
    rlhf(spec(*SHORT), "fixed")
    before = made(home, "fixed")
    for _ in range(2):
        with pytest.raises(InputError, match=r"run fixed has begun with the reward model .* choose another --run name"):
            rlhf(spec(*SHORT, "reward_model.fit.num_steps=9", "run.iterations=3"), "fixed")
    assert made(home, "fixed") == before
    rlhf(spec(*SHORT, "run.iterations=3"), "fixed")
    assert len(made(home, "fixed")[1]) == 4


def test_what_is_given_is_not_made(home: Path, toys: ToyEngines) -> None:
    report = rlhf(spec(*SHORT), "first")
    assert report.reward_model is not None
    assert report.training.policy is not None
    version, policy = report.reward_model.version, report.training.policy
    done = len(toys.done)
    given = f"given={{reward_model: {version}, policy: models:/{policy.name}/{policy.version}}}"
    second = rlhf(spec(given, "promote=false"), "second")
    assert not {*ALONE, "finetune_policy"} & set(toys.done[done:])
    assert second.reward_model is None
    assert made(home, "second")[0] == made(home, "first")[0]
    folders = [home / "runs" / "second" / name for name in ("reward-model", "start-policy")]
    as_folders = f"given={{reward_model: {folders[0]}, policy: {folders[1]}}}"
    rlhf(spec(as_folders, *SHORT), "third")
    document = json.loads((home / "store" / "runs" / "third" / "spec.json").read_text())
    assert (document["model"]["path"], document["sft"]) == (str(folders[1]), None)
    assert document["reward"]["sources"][0]["path"] == str(folders[0])
    with pytest.raises(InputError, match=f"{version} is no policy that ppoflow has registered"):
        check_rlhf(spec(f"given.policy={version}"), "none")
    with pytest.raises(RegistryError, match="no model is registered as nobody"):
        check_rlhf(spec("given.reward_model=models:/nobody/1"), "none")


def test_a_policy_that_is_trained_already_is_evaluated_and_promoted(home: Path, toys: ToyEngines) -> None:
    trained = rlhf(spec("promote=false", "evaluate=false", "run.registry.model=alone"), "first").training
    done, given = len(toys.done), "given.trained_policy=models:/alone/1"
    good = f"models:/alone/1, of iteration {trained.best_iteration} of run first"
    assert check_rlhf(spec(given)).good["policy"] == good
    report = rlhf(spec(given), "second")
    assert (report.training, report.reward_model, report.complaints) == (None, None, [])
    assert (report.evaluation.policy, report.promotion.moved is None) == ("models:/alone/1", False)  # type: ignore[union-attr]
    assert not {*ALONE, "finetune_policy", "generate_rollouts", "update_policy"} & set(toys.done[done:])
    assert not (home / "store" / "runs" / "second" / "iterations").exists()
    told = CliRunner().invoke(app, ["rlhf", str(HELPFUL / "rlhf.yaml"), "--set", given])
    assert "evaluated          models:/alone/1: " in told.stdout
    with pytest.raises(InputError, match="run nowhere"):
        check_rlhf(spec("given.trained_policy=nowhere@1", "promote=false"))
