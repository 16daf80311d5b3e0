"""Products in bf16: near fp32 ones, where they should be, and of the weights as they are at each pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infra.engines.hardware import has_bf16_units
from ppo_core.logprobs import response_logprobs
from ppo_core.models import divergence
from ppo_core.models.divergence import Head, TokenDivergence
from ppo_core.models.head import TokenLogprobs, values_beside
from ppo_core.models.loading import add_value_head
from ppo_core.models.packing import enable_packing
from ppo_core.models.precision import UNITS, multiply_in, products_in_bf16
from ppo_core.processes.threads import twin_of
from tests.ppo_core.tiny_models import ragged_sequences, tiny_policy

SEQUENCES = ragged_sequences(9)


def policy_in_bf16() -> nn.Module:
    """Packed, multiplying in bf16."""
    model = tiny_policy("llama-tied")
    enable_packing(model)
    multiply_in(model, "bfloat16")
    return model


def product_types(model: nn.Module) -> set[torch.dtype]:
    """What the layers of a pass over the sequences give."""
    found: set[torch.dtype] = set()
    linear = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "proj" in name]
    handles = [module.register_forward_hook(lambda _, __, made: found.add(made.dtype)) for module in linear]
    response_logprobs(model, SEQUENCES, temperature=1.0).sum().backward()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_logprobs_and_gradients_are_near_those_of_fp32_and_of_its_type(*, packed: bool) -> None:
    exact, near = tiny_policy("llama-tied"), tiny_policy("llama-tied")
    multiply_in(near, "bfloat16")
    for model in (exact, near):
        if packed:
            enable_packing(model)
    said = [response_logprobs(model, SEQUENCES, temperature=1.0, with_entropy=True) for model in (exact, near)]
    for (logprobs, entropy), model in zip(said, (exact, near), strict=True):
        assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
        (logprobs - entropy).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    for ours, theirs in zip(said[1], said[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)
        assert not torch.equal(ours, theirs)
    for (name, ours), theirs in zip(near.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        distance = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert distance < 0.1, name


def test_only_the_module_that_was_told_so_multiplies_in_bf16() -> None:
    assert product_types(policy_in_bf16()) == {torch.bfloat16}
    assert product_types(tiny_policy("llama-tied")) == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_a_pass_is_of_the_weights_as_they_are_then() -> None:
    """Autocast keeps what it rounded, as long as it lasts."""
    model = policy_in_bf16()
    with torch.no_grad():
        before = response_logprobs(model, SEQUENCES, temperature=1.0)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        after = response_logprobs(model, SEQUENCES, temperature=1.0)
    anew = tiny_policy("llama-tied")
    with torch.no_grad():
        for parameter in anew.parameters():
            parameter.mul_(1.5)
    enable_packing(anew)
    multiply_in(anew, "bfloat16")
    assert torch.equal(after, response_logprobs(anew, SEQUENCES, temperature=1.0).detach())
    assert not torch.equal(before, after)


def test_a_gradient_comes_after_a_pass_without_one() -> None:
    model = policy_in_bf16()
    with torch.no_grad():
        response_logprobs(model, SEQUENCES, temperature=1.0)
    response_logprobs(model, SEQUENCES, temperature=1.0).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("copied", [twin_of, copy.deepcopy])
def test_a_copy_multiplies_with_its_own_layers(copied: object) -> None:
    assert callable(copied)
    model = policy_in_bf16()
    other = copied(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: pytest.fail("a layer of the other one"))
    assert product_types(other) == {torch.bfloat16}


def test_values_keep_the_digits_of_fp32() -> None:
    """bf16 has 8 bits: 1000.3 would be 1000."""
    policy = tiny_policy("llama-tied")
    value_head = add_value_head(policy)
    enable_packing(policy)
    nn.init.constant_(value_head.weight, 30.0)
    exact = _beside(policy)
    multiply_in(policy, "bfloat16")
    near = _beside(policy)
    assert near.dtype == torch.float32
    assert not torch.equal(near, near.bfloat16().float())
    assert (near - exact).norm() / exact.norm() < 0.1


def _beside(policy: nn.Module) -> Tensor:
    with torch.no_grad(), values_beside(policy) as found:
        response_logprobs(policy, SEQUENCES, temperature=1.0)
    return found[0]


@pytest.mark.parametrize("entropy", [None, "detached", "differentiable"])
def test_the_fused_head_rounds_its_factors_and_adds_up_gradients_in_fp32(entropy: str | None) -> None:
    dice = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=dice).requires_grad_() for size in ((700, 16), (30, 16)))
    targets = torch.randint(0, 30, (700,), generator=dice)
    rounded = [part.detach().bfloat16().float().requires_grad_() for part in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        made = TokenLogprobs.apply(hidden, weight, targets, 1.0, entropy, True)
    expected = TokenLogprobs.apply(*rounded, targets, 1.0, entropy, True)
    torch.testing.assert_close(made, expected, rtol=0.02, atol=0.05)
    made.sum().backward()
    expected.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(weight.grad, rounded[1].grad, rtol=0.05, atol=1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fused_head_keeps_the_product_as_it_is_and_counts_in_fp32(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=dice) for size in ((70, 16), (30, 16)))
    targets = torch.randint(0, 30, (70,), generator=dice)
    product = hidden.bfloat16() @ weight.bfloat16().T
    exact = (product.double() / temperature).log_softmax(1).gather(1, targets[:, None])[:, 0]
    found = list[list[Tensor]]()
    for block in (1, 90, 2**20):
        monkeypatch.setattr(divergence, "ON_CPU", divergence.ON_CPU._replace(block=block))
        parts = [part.clone().requires_grad_() for part in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            made = TokenLogprobs.apply(*parts, targets, temperature, "differentiable", True)
        assert made.grad_fn.logits.dtype == torch.bfloat16
        assert torch.equal(made.grad_fn.logits, product)
        torch.testing.assert_close(made[:, 0].double(), exact, rtol=1e-5, atol=1e-5)
        made.sum().backward()
        found.append([made.detach(), *(part.grad for part in parts if part.grad is not None)])
    for others in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], others, strict=True))


@pytest.mark.parametrize("entropy", [None, "detached", "differentiable"])
def test_a_token_that_can_never_be_said_changes_no_other(entropy: str | None) -> None:
    """The last logit is minus infinity."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.5], [2.0], [-1.0], [-torch.inf]])
    made = TokenLogprobs.apply(hidden.requires_grad_(), weight, torch.tensor([1]), 1.0, entropy, True)
    said = torch.distributions.Categorical(logits=weight[:3, 0])
    expected = [said.log_prob(torch.tensor(1)).item(), said.entropy().item() if entropy else 0.0]
    assert made[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_product_is_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, generator=dice).bfloat16() for size in ((30, 7), (7, 16)))
    monkeypatch.setattr(divergence, "ON_CPU", divergence.ON_CPU._replace(product=100))
    total = torch.ones(30, 16)
    divergence.add_product(total, left, right)
    assert torch.equal(total, 1 + (left @ right).float())


def test_the_divergence_of_a_model_and_itself_is_zero_in_bf16_too() -> None:
    dice = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=dice).requires_grad_() for size in ((7, 16), (30, 16)))
    theirs = Head(hidden.detach(), weight.detach())
    with torch.autocast("cpu", torch.bfloat16):
        kl = TokenDivergence.apply(hidden, weight, theirs.hidden, theirs.weight, 1.0)
    assert kl.tolist() == [0.0] * 7
    kl.sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("hidden_size", [255, 256, 4096])
def test_auto_is_bf16_where_it_gains(monkeypatch: pytest.MonkeyPatch, hidden_size: int) -> None:
    if not torch.cuda.is_available():
        large = hidden_size > 255
        assert products_in_bf16("auto", hidden_size) == (has_bf16_units() and large)
        for unit in (*UNITS, None):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda unit=unit: {unit: True} if unit else {})
            assert products_in_bf16("auto", hidden_size) == (unit is not None and large)
    assert products_in_bf16("bfloat16", hidden_size)
    assert not products_in_bf16("float32", hidden_size)
