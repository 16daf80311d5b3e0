"""The entropy of `ppo_core.losses` against Python's own logarithms, closed forms and mutants of its source."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ppo_core import losses
from ppo_core.losses import entropy_from_logits


def assert_entropy(candidate: Callable[[Tensor], Tensor]) -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    for row, observed in zip(logits.tolist(), candidate(logits).tolist(), strict=True):
        weights = [math.exp(x) for x in row]
        probabilities = [w / sum(weights) for w in weights]
        assert observed == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-9)


def test_entropy_equals_its_definition() -> None:
    assert_entropy(entropy_from_logits)


@pytest.mark.parametrize(
    ("original", "replacement"), [("logsumexp(-1) - (", "logsumexp(-1) + ("), ("* finite)", "* logits)")]
)
def test_mutants_of_the_entropy_are_caught(original: str, replacement: str) -> None:
    source = inspect.getsource(losses)
    assert source.count(original) == 1, f"{original!r} is not in the source exactly once: adapt the mutation"
    mutant = ModuleType("mutated_losses")
    exec(source.replace(original, replacement), mutant.__dict__)
    with pytest.raises(AssertionError):
        assert_entropy(mutant.entropy_from_logits)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_an_offset_of_the_logits_costs_no_digits(offset: float) -> None:
    # Uniform: ln 4; certain: 0; logits 1 and 0: probabilities s and 1 - s with s = sigmoid(1). All exact in float32.
    s = 1 / (1 + math.exp(-1))
    logits = torch.tensor([[0.0] * 4, [500.0, 0.0, 0.0, 0.0], [1.0, 0.0, -500.0, -500.0]])
    expected = torch.tensor([math.log(4), 0.0, -s * math.log(s) - (1 - s) * math.log(1 - s)])
    torch.testing.assert_close(entropy_from_logits(logits + offset), expected, rtol=0, atol=1e-6)


def test_tokens_that_cannot_occur_contribute_nothing_to_entropy_or_gradient() -> None:
    allowed = torch.tensor([[0.3, -1.2, 2.0]], dtype=torch.float64, requires_grad=True)
    filtered = torch.tensor([[0.3, -math.inf, -1.2, 2.0]], dtype=torch.float64, requires_grad=True)
    for logits in (allowed, filtered):
        (1000 * entropy_from_logits(logits)).sum().backward()
    torch.testing.assert_close(entropy_from_logits(filtered), entropy_from_logits(allowed))
    assert allowed.grad is not None
    assert filtered.grad is not None
    torch.testing.assert_close(filtered.grad[:, [0, 2, 3]], allowed.grad)
    assert filtered.grad[0, 1].item() == 0.0


def test_the_gradient_of_the_entropy() -> None:
    # dH / dlogit_i = -p_i * (log p_i + H).
    p = [0.5, 0.25, 0.25]
    entropy = -sum(x * math.log(x) for x in p)
    logits = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
    entropy_from_logits(logits).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-x * (math.log(x) + entropy) for x in p], abs=1e-12)


def test_entropy_keeps_leading_dimensions_and_promotes_half_precision() -> None:
    observed = entropy_from_logits(torch.zeros(2, 3, 8, dtype=torch.bfloat16))
    assert observed.dtype == torch.float32
    torch.testing.assert_close(observed, torch.full((2, 3), math.log(8)))
