"""PPO with a value head on the policy, against plain torch on one loss; exact over restarts and replays."""

from __future__ import annotations

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
from tests.ppo_core.training.programs.shared_program import ALGORITHM, CASES, UPDATE
from tests.ppo_core.training.test_replay import assert_same_files, bytes_of
from tests.ppo_core.training.update_cases import TEMPERATURE, facts_of, make_experience, update_job


def plain_updates(coefficient: float) -> tuple[nn.Module, Tensor, dict[str, float]]:
    """Equation 9: one loss, one optimizer, one norm. Returns policy, head, and means of what was measured."""
    update, experience = update_job(**UPDATE).update, make_experience()
    sequences = [(list(prompt), list(response)) for prompt, response in experience.sequences()]
    policy, head = tiny_policy("llama-tied"), torch.zeros(32, requires_grad=True)
    settings = {"betas": update.betas, "eps": update.eps, "weight_decay": update.weight_decay}
    optimizer = torch.optim.AdamW([*policy.parameters(), head], lr=update.learning_rate, **settings)
    norms, losses = [], []
    for _ in range(update.num_ppo_epochs):
        logprobs, entropy = (f(policy, sequences, TEMPERATURE) for f in (plain_logprobs, plain_entropy))
        values, _ = plain_values(policy.model, head, sequences)
        value_loss = plain_value_loss(values, experience, update)
        optimizer.zero_grad()
        (plain_policy_loss(logprobs, experience, update, entropy) + coefficient * value_loss).backward()
        norms.append(float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], update.max_grad_norm)))
        losses.append(float(value_loss.detach()))
        optimizer.step()
    mean = {"policy/gradient_norm": sum(norms) / len(norms), "policy/value_loss": sum(losses) / len(losses)}
    return policy, head, mean


def assert_of_equation_9(folder: Path, facts: dict[str, float], coefficient: float) -> None:
    policy, head, mean = plain_updates(coefficient)
    weights, close = load_file(folder / "policy/model.safetensors"), {"rtol": 0, "atol": 1e-5}
    assert weights.keys() == dict(policy.named_parameters()).keys()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), **close)
    stored = load_file(folder / "value_head.safetensors")["weight"]
    torch.testing.assert_close(stored[0], head.detach(), **close)
    assert stored.abs().max() > 1e-3
    for name, value in mean.items():
        assert facts[name] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_the_update_is_that_of_equation_9(shared: Path, name: str) -> None:
    facts = facts_of(shared, "updates")[name]
    assert_of_equation_9(shared / name, facts, ALGORITHM.value_coef)
    assert 0 < facts["policy/value_clip_fraction"] < 1
    with pytest.raises(AssertionError):
        assert_of_equation_9(shared / name, facts, -ALGORITHM.value_coef)


@pytest.mark.parametrize("case", CASES)
def test_there_is_one_network_and_its_policy_is_like_any_other(shared: Path, case: str) -> None:
    folder, start = shared / case / "full4", shared / f"begun-llama-tied-{CASES[case][1]}"
    assert {path.name for path in folder.iterdir()} == {"policy", "optimizer", "state.json", "value_head.safetensors"}
    assert not load_file(start / "value_head.safetensors")["weight"].any()
    assert not [name for name in load_file(folder / "policy/model.safetensors") if "value" in name]
    assert [path.name for path in (folder / "optimizer").iterdir()] == ["policy-00000.safetensors"]
    AutoModelForCausalLM.from_pretrained(folder / "policy")


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_engine_replays_to_the_same_bytes(shared: Path, case: str) -> None:
    root, fact = shared / case, facts_of(shared, "runs")[case]
    assert_same_files(root / "full4", root / "full4-cold")
    assert_same_files(root / "full4", root / "full4-warm")
    full3, full4, thin3 = (bytes_of(root / name) for name in ("full3", "full4", "thin3"))
    assert full3["policy/model.safetensors"] == thin3["policy/model.safetensors"] != full4["policy/model.safetensors"]
    assert full3["value_head.safetensors"] != full4["value_head.safetensors"]
    assert [note for note in fact["notes"] if note.startswith("replaying update 2 of 2")]


@pytest.mark.parametrize("case", CASES)
def test_values_are_of_the_policys_hidden_states(shared: Path, case: str) -> None:
    root = shared / case
    full, thin = (load_file(root / f"of-{name}/experience.safetensors") for name in ("full3", "thin3"))
    assert all(torch.equal(full[name], thin[name]) for name in full)
    model = AutoModelForCausalLM.from_pretrained(root / "full3/policy", dtype=torch.float32)
    head = load_file(root / "full3/value_head.safetensors")["weight"].float()
    with torch.no_grad():
        values, _ = plain_values(model.base_model, head, [([3, 4], [5, 6 + i, EOS]) for i in range(4)])
    close = {"rtol": 0, "atol": 1e-5 if CASES[case][1] == "float32" else 0.05}  # bf16 has eight bits
    torch.testing.assert_close(full["values"].double(), values, **close)
    assert values.abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_parts_of_scores_are_rewards_at_their_tokens(shared: Path, case: str) -> None:
    """The KL has no price there."""
    experience = load_file(shared / case / "of-thin3/experience.safetensors")
    assert experience["rewards"].tolist() == [[float(i), 0.5, 0.0] for i in range(4)]
