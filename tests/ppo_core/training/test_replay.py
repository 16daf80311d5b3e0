"""Policy-only checkpoints: a fresh engine replays the updates since the last full one, and the bytes are the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ppo_core.records import canonical_json
from tests.ppo_core.training.update_cases import BF16, FP32, facts_of

CASES = [f"stage{stage}-{dtype}" for stage, dtype in FP32 + BF16] + ["adaptive", "moved", "warmed", "exact"]


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = {path for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_same_files(one: Path, other: Path) -> None:
    left, right = bytes_of(one), bytes_of(other)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


@pytest.mark.parametrize("case", CASES)
def test_a_full_checkpoint_is_the_same_however_many_before_it_were_thin(replayed: Path, case: str) -> None:
    root = replayed / case
    names = set(bytes_of(root / "full4"))
    assert {
        "policy/model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors", "state.json",
        "optimizer/policy-00000.safetensors", "optimizer/critic-00000.safetensors",
    } <= names  # fmt: skip
    assert_same_files(root / "full4", root / "full4-cold")
    assert_same_files(root / "full4", root / "full4-warm")
    assert load_file(root / "full4/policy/model.safetensors").keys()
    assert bytes_of(root / "full3")["policy/model.safetensors"] != bytes_of(root / "full4")["policy/model.safetensors"]


@pytest.mark.parametrize("case", CASES)
def test_a_thin_checkpoint_is_the_policy_and_how_to_replay_the_rest(replayed: Path, case: str) -> None:
    for number in (2, 3):
        full, thin = (bytes_of(replayed / case / f"{kind}{number}") for kind in ("full", "thin"))
        assert thin.keys() == {name for name in full if name.startswith("policy/")} | {"state.json"}
        assert all(thin[name] == full[name] for name in thin if name != "state.json")
        whole, state = (state_of(replayed / case / f"{kind}{number}") for kind in ("full", "thin"))
        experiences = [update["experience"] for update in state.pop("replay")]
        assert experiences == [f"experience{i}" for i in range(1, number)]
        assert whole.pop("replay") == []
        assert (whole.pop("full"), state.pop("full")) == (True, False)
        assert whole == state


def test_the_identity_is_the_derivation(replayed: Path) -> None:
    """sha256 over the job without `full` and `max_skipped_steps`, the checkpoint before, the experience."""
    thin = state_of(replayed / "adaptive/thin3")
    spec = {key: value for key, value in thin["replay"][1]["spec"].items() if key not in ("full", "max_skipped_steps")}
    before = state_of(replayed / "adaptive/full2")["identity"]
    text = canonical_json(["update_policy", spec, before, "experience2"])
    assert thin["identity"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_only_a_cold_engine_replays_and_says_so(replayed: Path, case: str) -> None:
    scenario = "stages" if case.startswith("stage") else "paths"
    fact = facts_of(replayed, scenario)[case]
    replaying = [note for note in fact["notes"] if note.startswith("replaying")]
    assert sorted(set(replaying)) == ["replaying update 1 of 2", "replaying update 2 of 2"]
    assert fact["notes"][-1].startswith("epoch ")
    assert fact["full4"] == fact["full4-cold"] == fact["full4-warm"]
    assert (fact["full4"]["full"], fact["thin3"]["full"]) == (True, False)
    assert fact["thin3"]["metrics"] == fact["full3"]["metrics"]


def test_the_paths_replayed_were_not_the_straight_one(replayed: Path) -> None:
    fact = facts_of(replayed, "paths")["adaptive"]
    assert fact["thin2"]["metrics"]["update/optimizer_steps"] < 5, "stopped by max_kl"
    assert fact["thin2"]["metrics"]["policy/learning_rate"] == 0.25e-3
    assert fact["thin3"]["metrics"]["policy/skipped_steps"] == 1.0
    assert state_of(replayed / "adaptive/thin3")["skipped_steps"] == {"policy": 1, "critic": 0}


def test_the_factor_multiplies_both_rates(replayed: Path) -> None:
    factor, halved = (bytes_of(replayed / name / "end") for name in ("factor", "halved"))
    assert [name for name in halved if factor[name] != halved[name]] == ["state.json"]
    fact = facts_of(replayed, "factor")
    assert fact["factor"] == fact["halved"]
    assert fact["factor"]["metrics"]["critic/learning_rate"] == 1e-3


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_deterministic_mode_is_on_for_its_job_alone_and_changes_nothing_on_a_cpu(
    replayed: Path, stage: int, dtype: str
) -> None:
    root = replayed / f"stage{stage}-{dtype}"
    plain, deterministic = bytes_of(root / "full1"), bytes_of(root / "deterministic1")
    assert [name for name in plain if plain[name] != deterministic[name]] == ["state.json"]
    fact = facts_of(replayed, "stages")[root.name]
    assert fact["modes"] == ["epoch 1 of 1"] * 2
    assert fact["off again"]


def test_advantages_of_a_thin_checkpoint_are_those_of_the_full_one(replayed: Path) -> None:
    fact = facts_of(replayed, "advantages")
    assert fact["thin3"] == fact["full3"]
    assert fact["full3"]["num_tokens"] == 12
    assert_same_files(replayed / "advantages-full3", replayed / "advantages-thin3")


REFUSALS = {
    "nothing": ["needs the inputs base, replay_0, replay_1; missing: base, replay_0, replay_1"],
    "one missing": ["missing: replay_1"],
    "thin base": ["thin2 is a policy-only checkpoint itself: base must be the last full one"],
    "other base": ["full2 is not the full checkpoint that", "thin3 goes back to"],
    "other experience": ["replay_1 is experience experience0, but", "was made with experience2"],
    "tampered": [
        "1 of 20 tensors differ, model.norm.weight first", "another kind of CPU or GPU, number of threads, or version",
        "Go on where it was made, or start from the last full checkpoint: ppoflow fork RUN@1 NEW",
    ],
    "of earlier code": [
        "earlier is a policy-only checkpoint of an earlier ppoflow, in which updates had no update.aggregation, ",
        "Go on with that version up to the next full checkpoint, or start from the last full checkpoint: ppoflow fork",
    ],
    "other ranks": ["was made by 1 training ranks, and 2 would round otherwise", "ppoflow fork RUN@1 NEW"],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_replayed_is_refused(replayed: Path, name: str) -> None:
    facts = facts_of(replayed, "refusals")
    for words in REFUSALS[name]:
        assert words in facts[name]["said"]
    assert not facts[name].get("held")


def test_an_engine_that_refused_is_as_good_as_before(replayed: Path) -> None:
    assert facts_of(replayed, "refusals")["good"]["full"]
    assert_same_files(replayed / "refused/end-good", replayed / "refused/full4")
