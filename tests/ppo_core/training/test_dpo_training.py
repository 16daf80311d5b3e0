"""Training on preferences under DeepSpeed against plain torch."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from ppo_core.models.lora import adapt
from tests.ppo_core.tiny_models import tiny_policy
from tests.ppo_core.training.plain_lora import A, B, PlainAdapted, stored, with_products
from tests.ppo_core.training.programs.dpo_program import ADAPTED, FIT, LORA, LORA_SEED, NORMALISED, rankings

CASES = {
    "llama": ("llama", FIT),
    "tied": ("llama-tied", FIT),
    "gpt2": ("gpt2", FIT),
    "sharded": ("llama", FIT),
    "normalised": ("llama", NORMALISED),
}
NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@pytest.fixture(scope="module")
def facts(programs: Path) -> dict[str, Any]:
    return json.loads((programs / "dpo" / "fits-1.json").read_text())


def said(model: Any, rows: Any, *, mean: bool) -> list[list[torch.Tensor]]:
    """The logprob of each row's responses, each text by itself, of response tokens alone."""
    found = []
    for row in rows:
        of_row = []
        for text in row.responses:
            table = torch.log_softmax(model(torch.tensor([text])).logits[0], dim=-1)
            tokens = [table[place - 1, text[place]] for place in range(row.prompt_tokens, len(text))]
            of_row.append(torch.stack(tokens).mean() if mean else torch.stack(tokens).sum())
        found.append(of_row)
    return found


def equation_7(policy: Any, reference: Any, rows: Any, spec: Any) -> tuple[torch.Tensor, list[float]]:
    """The mean over rows of the mean over pairs; and the means of what is measured, in the order of NAMES."""
    losses, measured = [], []
    after, before = (said(model, rows, mean=spec.length_normalised) for model in (policy, reference))
    for row, pi, ref in zip(rows, after, before, strict=True):
        rewards = [spec.beta * (p - r.detach()) for p, r in zip(pi, ref, strict=True)]
        terms = [
            -0.9 * logsigmoid(better - worse - row.margin) - 0.1 * logsigmoid(worse - better - row.margin)
            for better, worse in combinations(rewards, 2)
        ]
        losses.append(torch.stack(terms).mean())
        pairs = [(a, b, a - b, float(a > b)) for a, b in combinations([float(r.detach()) for r in rewards], 2)]
        measured.append([sum(part) / len(pairs) for part in zip(*pairs, strict=True)])
    loss = torch.stack(losses).mean()
    return loss, [float(loss.detach()), *(sum(part) / len(rows) for part in zip(*measured, strict=True))]


def two_steps(policy: Any, learns: list[torch.Tensor], name: str, spec: Any) -> tuple[list[list[float]], list[float]]:
    """Two steps of torch's AdamW on what learns: what was measured at each, and what of two rows after them."""
    reference, steps = tiny_policy(name), []
    settings = {"lr": spec.learning_rate, "betas": spec.betas, "eps": 1e-8, "weight_decay": spec.weight_decay}
    optimizer = torch.optim.AdamW(learns, **settings)
    for _ in range(2):
        loss, numbers = equation_7(policy, reference, rankings(), spec)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learns, spec.max_grad_norm)
        optimizer.step()
        steps.append(numbers)
    return steps, equation_7(policy, reference, rankings()[1:3], spec)[1]


def require_measured(facts: dict[str, Any], steps: list[list[float]], held_out: list[float]) -> None:
    curves, metrics = facts["curves"], facts["metrics"]
    for number, expected in enumerate(steps):
        # At the first step rewards are differences of equal numbers: which of two is larger is noise.
        told = NAMES if number else NAMES[:-1]
        found = {key: curves[key][number] for key in told}
        assert found == pytest.approx(dict(zip(told, expected, strict=False)), abs=7e-5)  # they have four digits
    assert [metrics[f"evaluation/{key}"] for key in NAMES] == pytest.approx(held_out, abs=2e-5)
    assert metrics["loss"] == pytest.approx((steps[0][0] + steps[1][0]) / 2, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_steps_are_two_of_adamw_on_equation_7(programs: Path, facts: dict[str, Any], case: str) -> None:
    name, spec = CASES[case]
    policy = tiny_policy(name)
    steps, held_out = two_steps(policy, [*policy.parameters()], name, spec)
    assert facts[case]["packed"] is True
    require_measured(facts[case], steps, held_out)
    saved = AutoModelForCausalLM.from_pretrained(programs / "dpo" / case / "policy")
    for name, parameter in policy.named_parameters():
        if name.endswith("c_attn.bias"):
            continue  # a key's bias changes no attention: its gradient is noise, which Adam's first step makes as large
        torch.testing.assert_close(saved.get_parameter(name).detach(), parameter.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ADAPTED)
def test_with_adapters_two_steps_move_their_factors_alone(programs: Path, facts: dict[str, Any], case: str) -> None:
    """As by autograd on the whole weight W + alpha / r * B A, of which W stays."""
    begun = tiny_policy("llama")
    adapt(begun, LORA, seed=LORA_SEED)
    learning = {name: p.detach() for name, p in begun.named_parameters() if p.requires_grad}
    factors = {n.replace(".adapter.down", A).replace(".adapter.up", B): factor for n, factor in learning.items()}
    policy = PlainAdapted(tiny_policy("llama"), factors, "llama", LORA)
    steps, held_out = two_steps(lambda tokens: policy(input_ids=tokens), [*policy.factors.values()], "llama", FIT)
    require_measured(facts[case], steps, held_out)
    saved = AutoModelForCausalLM.from_pretrained(programs / "dpo" / case / "policy")
    expected = with_products(policy.weights, policy.factors, "llama", LORA)
    for name, weight in expected.items():
        torch.testing.assert_close(saved.get_parameter(name).detach(), weight.detach(), rtol=0, atol=1e-5)
    assert {*stored(programs / "dpo" / case, "policy")} == {*factors}


def test_each_held_out_response_is_in_the_table(facts: dict[str, Any]) -> None:
    rows = rankings()[1:3]
    before = said(tiny_policy("llama"), rows, mean=False)
    table = facts["llama"]["responses"]
    places = [(number, rank) for number, row in enumerate(rows) for rank in range(len(row.responses))]
    assert [(line["row"], line["rank"]) for line in table] == places
    for line, (number, rank) in zip(table, places, strict=True):
        assert line["tokens"] == len(rows[number].responses[rank]) - rows[number].prompt_tokens
        assert line["reference_logprob"] == pytest.approx(float(before[number][rank].detach()), abs=1e-4)
        assert line["reward"] == pytest.approx(0.5 * (line["logprob"] - line["reference_logprob"]), abs=1e-5)


def test_two_ranks_make_what_one_makes(programs: Path, facts: dict[str, Any]) -> None:
    both = json.loads((programs / "dpo" / "fits-2.json").read_text())
    for case in CASES:
        assert [line["logprob"] for line in both[case]["responses"]] == pytest.approx(
            [line["logprob"] for line in facts[case]["responses"]], abs=1e-4
        )
        assert both[case]["metrics"]["evaluation/loss"] == pytest.approx(
            facts[case]["metrics"]["evaluation/loss"], abs=1e-5
        )


def test_it_learns_the_preferences_and_the_same_again_to_the_bit(programs: Path) -> None:
    found = json.loads((programs / "dpo" / "learns-1.json").read_text())
    curves = found["first"]["curves"]
    assert curves["loss"][-1] < 0.3 * curves["loss"][0]
    assert curves["rewards/accuracies"][-1] == 1.0
    assert found["first"] == found["again"]
    weights = [(programs / "dpo" / case / "policy" / "model.safetensors").read_bytes() for case in ("first", "again")]
    assert weights[0] == weights[1]


def test_of_sources_with_weights_each_batch_has_its_share(programs: Path) -> None:
    """At the first step all implicit rewards are 0, so a row's loss says its margin: 0.5 that of row 0, which has three
    of four draws."""
    found = json.loads((programs / "dpo" / "weighed-1.json").read_text())
    assert [row.margin for row in rankings()] == [0.5, 0.0, 0.0, 0.0]
    expected = (3 * math.log(1 + math.exp(0.5)) + math.log(2)) / 4
    assert found["metrics"]["loss"] == pytest.approx(expected, abs=1e-5)
