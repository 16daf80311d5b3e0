"""The whole way on toy engines where the registry is away at its end, and where another policy is given."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from flows.rlhf import rlhf
from ppo_core.records import InputError
from tasks.runs.errors import RegistryError
from tests.flows.test_rlhf import spec
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
