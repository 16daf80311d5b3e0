"""Adapters in the training engine, against plain autograd on W + scale * B A; exact over restarts and replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.ppo_core.plain_torch import (
    plain_entropy,
    plain_logprobs,
    plain_policy_loss,
    plain_value_loss,
    plain_values,
)
from tests.ppo_core.tiny_models import EOS, tiny_policy
from tests.ppo_core.training.plain_lora import A, B, PlainAdapted, stored, with_products
from tests.ppo_core.training.programs.lora_program import CASES, SPECS, UPDATE
from tests.ppo_core.training.test_replay import assert_same_files, bytes_of
from tests.ppo_core.training.update_cases import TEMPERATURE, facts_of, make_experience, update_job


def plain_updates(start: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What policy and critic learn in as many steps as the program's update has, by torch alone."""
    update, experience = update_job(**UPDATE).update, make_experience(name)
    sequences = [(list(prompt), list(response)) for prompt, response in experience.sequences()]
    policy = PlainAdapted(tiny_policy(name), stored(start, "policy"), name, SPECS[name])
    factors = {key.removeprefix("backbone."): factor for key, factor in stored(start, "critic").items()}
    head = factors.pop("value_head.weight").requires_grad_()
    trunk = PlainAdapted(tiny_policy(name).base_model, factors, name, SPECS[name])
    settings = {"betas": update.betas, "eps": update.eps, "weight_decay": update.weight_decay}
    optimizers = [
        torch.optim.AdamW(policy.factors.values(), lr=update.learning_rate, **settings),
        torch.optim.AdamW([*trunk.factors.values(), head], lr=update.critic_learning_rate, **settings),
    ]
    for _ in range(update.num_ppo_epochs):
        logprobs, entropy = (f(policy, sequences, TEMPERATURE) for f in (plain_logprobs, plain_entropy))
        values, _ = plain_values(trunk, head, sequences)
        losses = plain_policy_loss(logprobs, experience, update, entropy), plain_value_loss(values, experience, update)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], update.max_grad_norm)
            optimizer.step()
    critic = {f"backbone.{key}": factor for key, factor in trunk.factors.items()} | {"value_head.weight": head}
    return policy.factors, critic


@pytest.mark.parametrize("name", SPECS)
def test_the_factors_learn_as_by_plain_autograd_on_the_whole_weight(adapted: Path, name: str) -> None:
    start = adapted / f"begun-{name}-float32"
    for network, expected in zip(("policy", "critic"), plain_updates(start, name), strict=True):
        learned, begun = stored(adapted / f"updated-{name}", network), stored(start, network)
        assert learned.keys() == expected.keys() == begun.keys()
        for key, factor in expected.items():
            torch.testing.assert_close(learned[key], factor.detach(), rtol=0, atol=1e-5)
        assert all(not factor.any() for key, factor in begun.items() if key.endswith(B))
        assert min(float((learned[key] - begun[key]).abs().max()) for key in learned) > 1e-4


def test_ranks_that_share_the_frozen_weights_learn_the_same(adapted: Path) -> None:
    name = "llama-tied"
    start, written = adapted / f"begun-{name}-float32", adapted / "sharded"
    for network, expected in zip(("policy", "critic"), plain_updates(start, name), strict=True):
        learned = stored(written, network)
        for key, factor in expected.items():
            torch.testing.assert_close(learned[key], factor.detach(), rtol=0, atol=1e-5)
    alone, whole = (load_file(f / "policy/model.safetensors") for f in (adapted / f"updated-{name}", written))
    assert alone.keys() == whole.keys()
    for key, weight in alone.items():
        torch.testing.assert_close(whole[key], weight, rtol=0, atol=1e-5)
    assert_same_files(written, adapted / "sharded-again")
    policy = sum(parameter.numel() for parameter in tiny_policy(name).parameters())
    assert json.loads((adapted / "sharded-2.json").read_text())["held"] == (policy + 1664) / 2


@pytest.mark.parametrize("name", SPECS)
def test_what_is_exported_is_the_start_with_the_product_added(adapted: Path, name: str) -> None:
    updated, start = adapted / f"updated-{name}", adapted / f"begun-{name}-float32"
    weights, before = (load_file(folder / "policy/model.safetensors") for folder in (updated, start))
    factors = stored(updated, "policy")
    expected = with_products(
        {k: w.double() for k, w in before.items()}, {k: f.double() for k, f in factors.items()}, name, SPECS[name]
    )
    assert weights.keys() == before.keys()
    touched = {key.removesuffix(A) + ".weight" for key in factors if key.endswith(A)}
    for key, weight in weights.items():
        torch.testing.assert_close(weight.double(), expected[key], rtol=0, atol=1e-6)
        assert torch.equal(weight, before[key]) is (key not in touched), key
    assert len(touched) == (2 * 3 if name == "llama-tied" else 2 * 4)
    logits = AutoModelForCausalLM.from_pretrained(updated / "policy")(input_ids=torch.tensor([[3, 4, 5]])).logits
    model = PlainAdapted(tiny_policy(name), factors, name, SPECS[name])
    torch.testing.assert_close(logits, model(input_ids=torch.tensor([[3, 4, 5]])).logits, rtol=0, atol=1e-4)


def test_the_optimizer_has_moments_of_what_learns_alone(adapted: Path) -> None:
    """Rank 4 on q and v, 32 to 32, and down, 48 to 32, in two layers: 2 x 4 x (64 + 64 + 80) numbers; and the head."""
    folder = adapted / "stage0-float32/full4/optimizer"
    sizes = {
        part: sum(tensor.numel() for tensor in load_file(folder / f"{part}-00000.safetensors").values())
        for part in ("policy", "critic")
    }
    assert sizes == {"policy": 2 * 1664, "critic": 2 * (1664 + 32)}
    whole = sum(parameter.numel() for parameter in tiny_policy("llama-tied").parameters())
    assert sizes["policy"] < 2 * whole / 8


def test_the_files_are_those_of_peft(adapted: Path) -> None:
    config = json.loads((adapted / "updated-llama-tied/adapters/policy/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 12.0)
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    names = stored(adapted / "updated-llama-tied", "policy")
    assert names["model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    assert names["model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_engine_replays_to_the_same_bytes(adapted: Path, case: str) -> None:
    root, fact = adapted / case, facts_of(adapted, "runs")[case]
    assert_same_files(root / "full4", root / "full4-cold")
    assert_same_files(root / "full4", root / "full4-warm")
    full3, full4, thin3 = (bytes_of(root / name) for name in ("full3", "full4", "thin3"))
    for name in ("policy/model.safetensors", "adapters/policy/adapter_model.safetensors"):
        assert full3[name] == thin3[name] != full4[name]
    assert [note for note in fact["notes"] if note.startswith("replaying update 2 of 2")]
    assert fact["full4"]["metrics"]["policy/gradient_norm"] > 0


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_policy_without_its_adapters(adapted: Path, case: str) -> None:
    """Of the checkpoint after three updates: old logprobs are its own, reference logprobs the start's."""
    experience = load_file(adapted / case / "advantages/experience.safetensors")
    sequences = [([3, 4], [5, 6 + i, EOS]) for i in range(4)]
    close = {"rtol": 0, "atol": 1e-5 if CASES[case][1] == "float32" else 0.1}  # bf16 has eight bits
    start = adapted / f"begun-llama-tied-{CASES[case][1]}"
    for name, folder in {"reference_logprobs": start, "old_logprobs": adapted / case / "thin3"}.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(experience[name].double(), plain_logprobs(model, sequences, 1.0), **close)
    assert (experience["reference_logprobs"] - experience["old_logprobs"]).abs().max() > 0.15


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no start", ["holds adapters beside weights of the run's start: give that as `reference`"]),
        ("other rank", ["adapters/policy: base_model.model.", "is not as model.lora has it", "another rank, or other"]),
        ("incomplete", ["is not as model.lora has it (1 tensors)"]),
        ("missing", ["adapter_model.safetensors cannot be read", "made without model.lora, or is incomplete"]),
        ("no layer", ["target_modules: lm_head, q names no linear layer", "there are down_proj, gate_proj, k_proj"]),
        (
            "high rank",
            ["model.lora.rank=64 is above 32, the smaller side of model.layers.0.", "lower it to 32 or less"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(adapted: Path, case: str, words: list[str]) -> None:
    facts = facts_of(adapted, "refusals")[case]
    for word in words:
        assert word in facts["said"]
    assert not facts.get("files")
