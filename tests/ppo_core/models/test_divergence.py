"""KL over the whole vocabulary and its gradient, against float64 loops over tokens and finite differences of these."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppo_core.models.divergence
from ppo_core.algorithms.algorithm import Minibatch
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.models.divergence import ON_CPU, TokenDivergence, divergence
from ppo_core.models.forward import Models, Need
from ppo_core.models.lora import adapt, adapters_of
from ppo_core.models.packing import enable_packing
from ppo_core.spec import LoraSpec, UpdateSpec
from tests.ppo_core.plain_torch import padded, plain_distributions
from tests.ppo_core.tiny_models import CONFIGS, ragged_sequences, tiny_policy

TEMPERATURE = 0.7
SEQUENCES = ragged_sequences(5)


def looped(hidden: Tensor, weight: Tensor, their_hidden: Tensor, their_weight: Tensor) -> float:
    """The sum over tokens of sum_v p_v log(p_v / q_v), number by number."""
    total = 0.0
    for ours, theirs in zip((hidden @ weight.t()).tolist(), (their_hidden @ their_weight.t()).tolist(), strict=True):
        p, q = ([math.exp(z / TEMPERATURE) for z in logits] for logits in (ours, theirs))
        total += sum(a / sum(p) * math.log(a / sum(p) * sum(q) / b) for a, b in zip(p, q, strict=True))
    return total


def random(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of five tokens of width 3, an output of seven words, and those of the reference; float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (5, 3), (7, 3), (5, 3), (7, 3)
    hidden, weight, their_hidden, their_weight = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes
    )
    return hidden, weight, their_hidden, their_weight


@pytest.mark.parametrize("chunk", [1, 21, 10**6])
def test_value_and_gradient_are_those_of_the_sum_over_the_vocabulary(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ppo_core.models.divergence, "ON_CPU", ON_CPU._replace(pair=chunk))
    exact = random(1)
    hidden, weight, *theirs = (part.float() for part in exact)
    ours = TokenDivergence.apply(hidden.requires_grad_(), weight.requires_grad_(), *theirs, TEMPERATURE)
    assert float(ours.detach().double().sum()) == pytest.approx(looped(*exact), rel=1e-5)
    ours.sum().backward()
    step = 1e-6
    for place, gradient in ((0, hidden.grad), (1, weight.grad)):
        assert gradient is not None
        for index in range(exact[place].numel()):
            ends = []
            for sign in (1, -1):
                parts = [part.clone() for part in exact]
                parts[place].view(-1)[index] += sign * step
                ends.append(looped(*parts))
            assert float(gradient.view(-1)[index]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-5)


def test_it_is_zero_between_equals_and_keeps_its_digits_near_zero() -> None:
    """d is about a thousandth, and KL half its variance, 5e-7: in float32 the sum of p (log p - log q) loses it."""
    hidden, weight, *_ = (part.float() for part in random(2))
    assert TokenDivergence.apply(hidden, weight, hidden, weight, TEMPERATURE).tolist() == [0.0] * 5
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    near = logits + 1e-3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    log_p, log_q = logits.log_softmax(1), near.log_softmax(1)
    expected = (log_p.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(divergence(log_p.float(), log_q.float()).double(), expected, rtol=1e-3, atol=0)


def test_words_that_cannot_come() -> None:
    """Of either: 0 where both never say them, infinity where the policy does and the reference never."""
    half, all_on_one = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[1.0, 0.0, 0.0]]).log()
    assert divergence(half, half).tolist() == [0.0]
    assert divergence(all_on_one, half).tolist() == pytest.approx([math.log(2)])
    assert divergence(half, all_on_one).tolist() == [math.inf]
    far = torch.tensor([[0.0, -300.0]]), torch.tensor([[-300.0, 0.0]])
    assert divergence(*far).tolist() == pytest.approx([300.0])


def plain_kl_table(policy: Any, reference: Any) -> Tensor:
    """`[B, R]` in float64, from the full logits of one sequence at a time."""
    rows = []
    for prompt, response in SEQUENCES:
        log_p = plain_distributions(policy, prompt, response, TEMPERATURE)
        log_q = plain_distributions(reference, prompt, response, TEMPERATURE).detach()
        rows.append((log_p.exp() * (log_p - log_q)).sum(1))
    return padded(rows, max(len(response) for _, response in SEQUENCES))


def gradients_of(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_of_models_it_is_that_of_plain_forward_passes(name: str, packed: bool) -> None:
    policy, reference = tiny_policy(name), tiny_policy(name, seed=1)
    expected = plain_kl_table(policy, reference)
    plain = gradients_of(policy, expected.sum())
    if packed:
        enable_packing(policy)
        enable_packing(reference)
    need = Need(logprobs=True, entropy="detached", kl=True)
    said = Models({"policy": policy}, TEMPERATURE, reference).forward(SEQUENCES, need)
    assert said.kl is not None
    torch.testing.assert_close(said.kl.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    assert float(expected.detach().max()) > 0.1
    for key, gradient in gradients_of(policy, said.kl.sum()).items():
        torch.testing.assert_close(gradient, plain[key], rtol=1e-4, atol=1e-4)
    without = Models({"policy": policy}, TEMPERATURE).forward(SEQUENCES, need._replace(kl=False))
    assert without.kl is None
    assert torch.equal(without.logprobs, said.logprobs)
    assert torch.equal(without.entropy, said.entropy)


def test_the_reference_of_a_policy_with_adapters_is_the_policy_without_them() -> None:
    policy, start = tiny_policy("llama"), tiny_policy("llama")
    adapt(policy, LoraSpec(rank=2), seed=1)
    for adapter in adapters_of(policy).values():
        nn.init.normal_(adapter.up, std=0.2, generator=torch.Generator().manual_seed(2))
    enable_packing(policy)
    expected = plain_kl_table(policy, start).detach()
    said = Models({"policy": policy}, TEMPERATURE).forward(SEQUENCES, Need(kl=True))
    assert said.kl is not None
    torch.testing.assert_close(said.kl.detach().double(), expected, rtol=1e-4, atol=1e-5)
    assert float(expected.max()) > 0.01


def test_in_the_loss_it_is_the_mean_over_the_tokens_that_count() -> None:
    """Advantages of 0, and no entropy bonus: the loss is the KL alone, times its coefficient."""
    policy, reference = tiny_policy("llama"), tiny_policy("llama", seed=1)
    spec = UpdateSpec(kl_loss_coef=0.3, kl_loss_estimator="full")
    outputs = Models({"policy": policy}, TEMPERATURE, reference).forward(SEQUENCES, CLIPPED_SURROGATE.need(spec))
    assert outputs.logprobs is not None
    table = plain_kl_table(policy, reference).detach()
    mask = table > 0
    mask[0, 0] = False
    minibatch = Minibatch(mask, outputs.logprobs.detach(), torch.zeros_like(outputs.logprobs))
    loss = CLIPPED_SURROGATE.loss(outputs, minibatch, spec, int(mask.sum()))
    assert float(loss.total.detach()) == pytest.approx(0.3 * float(table[mask].mean()), rel=1e-4)
    assert not CLIPPED_SURROGATE.need(spec.model_copy(update={"kl_loss_coef": 0.0})).kl
