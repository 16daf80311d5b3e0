"""The training engine with RLOO: no critic anywhere, and exact over restarts and replays like every algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ppo_core.training.programs.rloo_program import CASES
from tests.ppo_core.training.test_replay import assert_same_files, bytes_of
from tests.ppo_core.training.update_cases import facts_of


@pytest.mark.parametrize("case", CASES)
def test_no_checkpoint_has_a_critic(rloo: Path, case: str) -> None:
    dtype = CASES[case][1]
    for folder in (rloo / f"begun-{dtype}", *(rloo / case / name for name in ("full1", "full4", "thin3"))):
        assert not (folder / "critic").exists()
        state = json.loads((folder / "state.json").read_text())
        assert (state["num_steps"].keys(), state["skipped_steps"]) == ({"policy"}, {"policy": 0})
    assert [path.name for path in (rloo / case / "full4/optimizer").iterdir()] == ["policy-00000.safetensors"]


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_engine_replays_to_the_same_bytes(rloo: Path, case: str) -> None:
    root, fact = rloo / case, facts_of(rloo, "runs")[case]
    assert_same_files(root / "full4", root / "full4-cold")
    assert_same_files(root / "full4", root / "full4-warm")
    weights = [bytes_of(root / name)["policy/model.safetensors"] for name in ("full3", "full4", "thin3")]
    assert weights[0] == weights[2] != weights[1]
    assert [note for note in fact["notes"] if note.startswith("replaying update 2 of 2")]
    assert not [name for name in fact["full4"]["metrics"] if name.startswith("critic/")]
    assert fact["full4"]["metrics"]["policy/gradient_norm"] > 0


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_those_of_a_group_of_four(rloo: Path, case: str) -> None:
    """Scores 0, 1, 2, 3 against the mean of the other three: -2, -2/3, 2/3, 2; from both kinds of checkpoints."""
    full, thin = (rloo / case / f"advantages-{name}/experience.safetensors" for name in ("full3", "thin3"))
    assert full.read_bytes() == thin.read_bytes()
    experience = load_file(full)
    assert experience.keys() & {"values", "returns"} == set()
    expected = torch.tensor([-2.0, -2 / 3, 2 / 3, 2.0])[:, None].expand(4, 3)
    torch.testing.assert_close(experience["advantages"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", ["recipe0", "recipe1", "recipe2", "recipe3", "recipe4"])
def test_with_the_same_advantages_the_policy_learns_just_as_beside_a_critic(
    rloo: Path, trained: Path, recipe: str
) -> None:
    ours, theirs = (load_file(folder / f"{recipe} policy.safetensors") for folder in (rloo, trained))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rloo from ppo", "has the training state of policy and critic, and the algorithm of this job trains policy:"),
        ("ppo from rloo", "has the training state of policy, and the algorithm of this job trains policy and critic:"),
        ("ppo from thin rloo", "stage0-float32/thin3 has the training state of policy, and the algorithm of this job"),
    ],
)
def test_a_checkpoint_of_other_networks_is_refused(rloo: Path, case: str, words: str) -> None:
    said = facts_of(rloo, "refusals")[case]["said"]
    assert words in said
    assert "keep the algorithm that made it, or start a run of its own from the policy in it (model.path=" in said
