"""A step without finite numbers leaves its network as it was, to the bit, and the other network's step goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ppo_core.training.update_cases import BF16, FP32, checkpoint_folder

FILES = {
    "policy": ("policy/model", "optimizer/policy-00000"),
    "critic": ("critic/model", "critic/value_head", "optimizer/critic-00000"),
}
SPOILED = {"advantage": "policy", "return": "critic"}


def same(part: str, one: Path, other: Path) -> bool:
    return all(
        (one / f"{name}.safetensors").read_bytes() == (other / f"{name}.safetensors").read_bytes()
        for name in FILES[part]
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_a_skipped_step_is_no_step_and_the_other_network_takes_its_own(
    skipped: Path, stage: int, dtype: str, ranks: int
) -> None:
    def at(name: str) -> Path:
        return checkpoint_folder(skipped, stage, dtype, f"{name}-{ranks}")

    taken = {"advantage": ("clean1", "clean2"), "return": ("clean2", "clean2"), "after": ("clean3", "clean3")}
    for name, (policy, critic) in taken.items():
        assert same("policy", at(name), at(policy)), name
        assert same("critic", at(name), at(critic)), name
    for part in FILES:
        assert not same(part, at("clean1"), at("clean2"))
        assert not same(part, at("clean2"), at("clean3"))
    states = {name: json.loads((at(name) / "state.json").read_text()) for name in taken}
    assert [[state["num_steps"][part] for part in FILES] for state in states.values()] == [[1, 2], [2, 2], [3, 3]]
    counts = [[state["skipped_steps"][part] for part in FILES] for state in states.values()]
    assert counts == [[1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_a_skipped_step_adds_its_count_alone(skipped: Path, stage: int, dtype: str, ranks: int) -> None:
    facts = json.loads((skipped / f"skip-{ranks}.json").read_text())
    bad, good = (facts[checkpoint_folder(skipped, stage, dtype, f"{n}-{ranks}").name] for n in ("advantage", "clean2"))
    assert (good["policy/skipped_steps"], good["critic/skipped_steps"]) == (0.0, 0.0)
    assert (bad["policy/skipped_steps"], bad["critic/skipped_steps"]) == (1.0, 0.0)
    assert all(math.isfinite(value) for value in bad.values())
    assert "policy/loss" not in bad
    rest = {name for name in good if not name.startswith("policy/")}
    assert {name: bad[name] for name in rest} == {name: good[name] for name in rest}


@pytest.mark.parametrize(("kind", "network"), SPOILED.items())
def test_too_many_in_a_row_end_the_run_over_iterations(skipped: Path, kind: str, network: str) -> None:
    facts = json.loads((skipped / "give_up-1.json").read_text())
    *before, last = facts[kind]
    assert before == ["", ""]
    rate = "update.critic_learning_rate" if network == "critic" else "update.learning_rate"
    assert last.startswith(f"{network}: 3 optimizer steps in a row had no finite loss and gradient norm")
    assert "the loss is inf" in last or "the loss is -inf" in last or "the loss is nan" in last
    assert "guards.max_skipped_steps=3" in last
    assert last.endswith(f"lower {rate}, and look at the scores")
    assert facts[f"{kind} and back"] == [""] * 5


def test_a_limit_of_one_skips_nothing(skipped: Path) -> None:
    said = json.loads((skipped / "give_up-1.json").read_text())["at once"]
    assert said.startswith("policy: 1 optimizer step had no finite loss")


def test_without_its_guards_the_update_is_caught_by_these_tests(skipped: Path) -> None:
    """The critic whose infinite loss has a finite gradient moves; the policy without a look at the norm is gone."""
    start = skipped / "start-llama-tied-float32-1"
    heads = [load_file(folder / "critic/value_head.safetensors")["weight"] for folder in (start, skipped / "trusting")]
    assert not torch.equal(*heads)
    assert heads[1].isfinite().all()
    stepped = load_file(skipped / "stepping/policy/model.safetensors")
    assert not all(bool(weight.isfinite().all()) for weight in stepped.values())
