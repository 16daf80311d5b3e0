"""A critic that begins as a folder of the user's: what it is made of counts, and no stage but the start reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_core.records import InputError
from tasks.checks.preflight import preflight
from tasks.runs.fork import fork_run, fork_spec
from tests.flows.test_verify import verify
from tests.tasks.run_contexts import smoke_spec
from tests.tasks.toy_runs import ToyRun, digests, killed

SHORT = ("iterations=3", "evaluation.every=2")


def reward_model(folder: Path, weights: str = "scores") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_text(weights)
    return folder


def trained(home: Path, *overrides: str) -> ToyRun:
    run = ToyRun(home, (*SHORT, *overrides))
    run.train()
    return run


def place(folder: Path) -> str:
    return f"model.critic={folder}"


@pytest.mark.usefixtures("prefect_server")
def test_it_counts_by_its_files_and_nothing_before_the_start_is_made_anew(tmp_path: Path) -> None:
    one, same = reward_model(tmp_path / "one"), reward_model(tmp_path / "same")
    other = reward_model(tmp_path / "other", "other scores")
    plain = trained(tmp_path / "plain")
    first = trained(tmp_path / "home", place(one))
    moved, changed = (ToyRun(first.home, (*SHORT, place(folder)), folder.name) for folder in (same, other))
    for run in (moved, changed):
        run.train()
    assert digests(moved.records()) == digests(first.records())
    assert moved.engines.count("start_policy") == changed.engines.count("finetune_policy") == 0
    starts = [run.records()[0].checkpoint.digest for run in (plain, first, changed)]
    assert len(set(starts)) == 3
    assert {run.records()[0].artifacts["finetune_policy"].digest for run in (plain, changed)} == {
        first.records()[0].artifacts["finetune_policy"].digest
    }


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_was_killed_ends_with_the_same_bytes_and_can_be_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = reward_model(tmp_path / "rm")
    whole, broken = trained(tmp_path / "whole", place(folder)), ToyRun(tmp_path / "home", (*SHORT, place(folder)))
    for job in ("start_policy", "update_policy"):
        broken.engines.before(job, 1, killed)
        broken.train_until_killed()
    broken.train()
    assert digests(broken.records()) == digests(whole.records())
    monkeypatch.setenv("PPOFLOW_HOME", str(broken.home))
    assert all(found.same for found in verify(broken, tmp_path / "scratch"))
    fork_run(broken.name, 2, "new", ["iterations=5"])
    with pytest.raises(InputError, match=r"model.critic: '.*rm' -> None"):
        fork_spec(broken.name, 2, "new", ["model.critic=null"])
    (folder / "model.safetensors").write_text("other scores")
    (differs,) = [found for found in verify(broken, tmp_path / "again", "0") if not found.same]
    assert differs.stage == "start_policy"


def test_it_has_to_be_a_folder_of_a_model_before_anything_starts(tmp_path: Path) -> None:
    def check() -> list[str]:
        return preflight(smoke_spec(place(tmp_path / "rm")))

    with pytest.raises(InputError, match=r"there is no folder .*rm: give .* in model.critic$"):
        check()
    folder = reward_model(tmp_path / "rm")
    assert check() == []
    config = {"model_type": "unheard_of", "auto_map": {"AutoModelForSequenceClassification": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"needs custom code .* PPOFLOW_TRUST_REMOTE_CODE=1"):
        check()
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="give the folder of a Hugging Face sequence classifier or causal LM in model"):
        check()
