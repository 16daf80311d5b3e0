"""The supervised start against torch's own cross-entropy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ppo_core.data.shares import Share
from ppo_core.training.supervised import example_order
from tests.ppo_core.tiny_models import ragged_sequences, tiny_policy
from tests.ppo_core.training.update_cases import ROWS


def test_one_step_is_one_of_adamw_on_the_cross_entropy_of_the_completions(trained: Path) -> None:
    policy = tiny_policy("llama-tied")
    losses = []
    for prompt, completion in ragged_sequences(ROWS):
        logits = policy(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        losses.append(functional.cross_entropy(logits, torch.tensor(completion), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    torch.optim.AdamW(policy.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01).step()
    facts = json.loads((trained / "supervised-1.json").read_text())
    microbatches = ROWS // 2
    for case, passes in {"1": microbatches, "recomputed": 2 * microbatches, "threes": 3}.items():
        expected = {"sft/first_loss": loss.item(), "sft/loss": loss.item(), "passes": passes}
        assert facts[case] == pytest.approx(expected, abs=1e-5)
        trained_policy = AutoModelForCausalLM.from_pretrained(trained / f"sft{case}")
        for name, parameter in policy.named_parameters():
            observed = trained_policy.get_parameter(name).detach()
            torch.testing.assert_close(observed, parameter.detach(), rtol=0, atol=1e-5)


def test_forty_steps_on_the_same_examples_learn_them(trained: Path) -> None:
    facts = json.loads((trained / "supervised-1.json").read_text())["40"]
    assert facts["sft/loss"] < 0.5 * facts["sft/first_loss"]


def test_a_step_that_is_not_finite_ends_it(trained: Path) -> None:
    facts = json.loads((trained / "supervised-1.json").read_text())
    assert facts["nan weight"] == "SFT step 0: the loss is nan: lower sft.learning_rate"
    assert facts["infinite gradient"].startswith("SFT step 0: the gradient norm is ")


def test_examples_come_in_whole_epochs_each_in_its_own_order() -> None:
    order = example_order(7, 17, seed=3)
    first, second, rest = order[:7], order[7:14], order[14:]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert len(rest) == len(set(rest)) == 3
    assert order == example_order(7, 17, seed=3)
    assert order[:5] == example_order(7, 5, seed=3)
    assert order != example_order(7, 17, seed=4)


def test_sources_have_their_shares_of_each_epoch() -> None:
    """Rows 0 to 5 are of the first source, 6 to 8 of the other, which gets two of three draws."""
    order = example_order(9, 27, 3, "preferences", [Share(6, 3), Share(3, 6)])
    for epoch in (order[:9], order[9:18], order[18:]):
        assert len([row for row in epoch if row < 6]) == 3
        assert [epoch.count(row) for row in (6, 7, 8)] == [2, 2, 2]
    assert sorted(row for row in order[:18] if row < 6) == list(range(6))
    assert order == example_order(9, 27, 3, "preferences", [Share(6, 3), Share(3, 6)])
    assert order != example_order(9, 27, 4, "preferences", [Share(6, 3), Share(3, 6)])
