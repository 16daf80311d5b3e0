"""The losses against float64 loops written from the papers, fixed numbers and mutants of their own source."""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core import losses
from ppo_core.losses import policy_loss, value_loss

CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, batch: int = 4, length: int = 6) -> tuple[Tensor, ...]:
    """Logprobs, old logprobs (ratios well outside the clip both ways), advantages, weights, mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, change, advantages = torch.randn(3, batch, length, generator=generator, dtype=torch.float64)
    weights, chance = torch.rand(2, batch, length, generator=generator, dtype=torch.float64)
    mask = chance < 0.7
    mask[0, 0] = True
    return logprobs, logprobs + change, advantages, weights, mask


def loop_policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
) -> float:
    """Equation 7 of the PPO paper with two bounds; where A < 0, equation 4 of the dual-clip paper."""
    terms = []
    for b, t in mask.nonzero().tolist():
        ratio, advantage = math.exp(logprobs[b, t].item() - old[b, t].item()), advantages[b, t].item()
        objective = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
        if dual_clip is not None and advantage < 0:
            objective = max(objective, dual_clip * advantage)
        terms.append(-objective * (1.0 if importance_weights is None else importance_weights[b, t].item()))
    return sum(terms) / len(terms)


def loop_value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> float:
    terms = []
    for b, t in mask.nonzero().tolist():
        value, before, target = values[b, t].item(), old[b, t].item(), returns[b, t].item()
        clipped = value if clip is None else before + min(max(value - before, -clip), clip)
        terms.append(0.5 * max((value - target) ** 2, (clipped - target) ** 2))
    return sum(terms) / len(terms)


def assert_policy_loss(candidate: Callable[..., Tensor]) -> None:
    logprobs, old, advantages, weights, mask = draw(0)
    for options in (CLIPS, {**CLIPS, "dual_clip": 1.5}, {**CLIPS, "importance_weights": weights}):
        expected = loop_policy_loss(logprobs, old, advantages, mask, **options)
        assert candidate(logprobs, old, advantages, mask, **options).item() == pytest.approx(expected, abs=1e-9)


def assert_value_loss(candidate: Callable[..., Tensor]) -> None:
    values, old, returns, _, mask = draw(0)
    for clip in (None, 0.2):
        expected = loop_value_loss(values, old, returns, mask, clip=clip)
        assert candidate(values, old, returns, mask, clip=clip).item() == pytest.approx(expected, abs=1e-9)


def mutant(original: str, replacement: str) -> ModuleType:
    """The losses with one piece of their source exchanged."""
    source = inspect.getsource(losses)
    assert source.count(original) == 1, f"{original!r} is not in the source exactly once: adapt the mutation"
    module = ModuleType("mutated_losses")
    exec(source.replace(original, replacement), module.__dict__)
    return module


def test_docstring_examples() -> None:
    assert doctest.testmod(losses) == (0, 8)


def test_losses_equal_their_equations() -> None:
    assert_policy_loss(policy_loss)
    assert_value_loss(value_loss)


@pytest.mark.parametrize(
    ("loss", "original", "replacement"),
    [
        ("policy", "weighted_mean(-objective", "weighted_mean(objective"),
        ("policy", "torch.minimum(ratio", "torch.maximum(ratio"),
        ("policy", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)"),
        ("policy", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio"),
        ("policy", "advantages < 0, torch.maximum", "advantages > 0, torch.maximum"),
        ("policy", "torch.maximum(objective, dual", "torch.minimum(objective, dual"),
        ("policy", "terms * zero_masked", "terms / zero_masked"),
        ("policy", "zero_masked(logprobs, response_mask) - zero", "zero_masked(logprobs, response_mask) + zero"),
        ("policy", "total / mask.sum().clamp(min=1)", "total / mask.numel()"),
        ("value", "(values - returns).square()", "(values + returns).square()"),
        ("value", "torch.maximum(errors", "torch.minimum(errors"),
        ("value", "0.5 * errors", "errors"),
        ("value", "0.5 * errors", "-0.5 * errors"),
        ("value", "clamp(old_values - clip, old_values + clip)", "clamp(old_values - 2 * clip, old_values + clip)"),
    ],
)
def test_mutants_are_caught(loss: str, original: str, replacement: str) -> None:
    module = mutant(original, replacement)
    with pytest.raises(AssertionError):
        assert_policy_loss(module.policy_loss) if loss == "policy" else assert_value_loss(module.value_loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.5, 2.0, None, -2.6, 0.0),  # clipped above at 1.3: nothing more to gain
        (0.5, 2.0, None, -1.0, -1.0),  # a good token that became less likely is never clipped
        (0.5, -2.0, None, 1.6, 0.0),  # clipped below at 0.8
        (1.5, -2.0, None, 3.0, 3.0),
        (5.0, -2.0, None, 10.0, 10.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clip: no more than 3 * |A|
        (1.5, -2.0, 3.0, 3.0, 3.0),
        (5.0, 2.0, 3.0, -2.6, 0.0),  # dual clip leaves positive advantages alone
    ],
)
def test_every_region_of_the_surrogate(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float
) -> None:
    # The derivative with respect to the logprob of an unclipped term -ratio * A is itself.
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[True]])
    advantages = torch.full_like(old, advantage)
    observed = policy_loss(logprobs, old, advantages, mask, dual_clip=dual_clip, **CLIPS)
    observed.backward()
    assert observed.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-12)


def test_on_policy_the_gradient_is_the_policy_gradient_even_when_old_is_the_same_tensor() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -3.0, 9.0]], requires_grad=True)
    weights, mask = torch.ones(1, 3, requires_grad=True), torch.tensor([[True, True, False]])
    policy_loss(logprobs, logprobs, advantages, mask, importance_weights=weights, **CLIPS).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.5, 1.5, 0.0]]
    assert advantages.grad is None
    assert weights.grad is None


@pytest.mark.parametrize("change", [1000.0, -1000.0])
def test_a_huge_log_ratio_stays_finite(change: float) -> None:
    logprobs = torch.tensor([[change]], requires_grad=True)
    loss = policy_loss(logprobs, torch.zeros(1, 1), -torch.ones(1, 1), torch.tensor([[True]]), **CLIPS)
    loss.backward()
    # exp(20) = 485165195.41 above; below, the clip at 0.8 holds.
    assert loss.item() == pytest.approx(485165195.41 if change > 0 else 0.8, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (3.0, 2.0, 4.0, None, 0.5, -1.0),
        (3.0, 2.0, 4.0, 0.5, 1.125, 0.0),  # clipped to 2.5, whose error 1.5 is the larger: no gradient
        (3.0, 2.0, 2.5, 0.5, 0.125, 0.5),  # clipped to 2.5, error 0: the larger error 0.5 is the unclipped one's
        (2.2, 2.0, 4.0, 0.5, 1.62, -1.8),  # within the clip
        (1.0, 2.0, 0.0, 0.5, 1.125, 0.0),
    ],
)
def test_every_region_of_the_value_loss(
    value: float, old: float, target: float, clip: float | None, loss: float, slope: float
) -> None:
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([[x]], dtype=torch.float64) for x in (old, target)]
    observed = value_loss(values, *others, torch.tensor([[True]]), clip=clip)
    observed.backward()
    assert observed.item() == pytest.approx(loss, abs=1e-12)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-12)


@st.composite
def partitions(draw_part: st.DrawFn) -> list[list[int]]:
    """Rows 0..5 in any order, cut into microbatches of any sizes."""
    order = draw_part(st.permutations(range(6)))
    cuts = sorted(draw_part(st.sets(st.integers(1, 5))))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]


@given(seeds, partitions())
@settings(max_examples=40, deadline=None)
def test_losses_and_gradients_do_not_depend_on_the_microbatches(seed: int, parts: list[list[int]]) -> None:
    logprobs, old, advantages, weights, mask = draw(seed, batch=6)
    tokens = int(mask.sum())

    def both(rows: list[int], x: Tensor) -> Tensor:
        inputs = x[rows], old[rows], advantages[rows], mask[rows]
        importance_weights = weights[rows]
        surrogate = policy_loss(*inputs, importance_weights=importance_weights, normalizer=tokens, **CLIPS)
        return surrogate + value_loss(*inputs, clip=0.2, normalizer=tokens)

    whole, pieces = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    expected = loop_policy_loss(logprobs, old, advantages, mask, importance_weights=weights, **CLIPS)
    expected += loop_value_loss(logprobs, old, advantages, mask, clip=0.2)
    total = both(list(range(6)), whole)
    total.backward()
    losses_of_parts = [both(rows, pieces) for rows in parts]
    torch.stack(losses_of_parts).sum().backward()
    assert total.item() == pytest.approx(expected, abs=1e-9)
    assert sum(loss.item() for loss in losses_of_parts) == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-9, atol=1e-12)


@given(seeds, st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_extra_right_padding_changes_nothing(seed: int, padding: int) -> None:
    logprobs, old, advantages, _, mask = draw(seed)
    padded = [torch.nn.functional.pad(x, (0, padding), value=3.0) for x in (logprobs, old, advantages)]
    padded_mask = torch.nn.functional.pad(mask, (0, padding), value=False)
    expected = loop_policy_loss(logprobs, old, advantages, mask, **CLIPS)
    assert policy_loss(*padded, padded_mask, **CLIPS).item() == pytest.approx(expected, abs=1e-9)
    expected = loop_value_loss(logprobs, old, advantages, mask, clip=0.2)
    assert value_loss(*padded, padded_mask, clip=0.2).item() == pytest.approx(expected, abs=1e-9)


def test_a_normalizer_may_be_a_tensor_and_divides_the_sum() -> None:
    x, mask = torch.tensor([[2.0, 4.0, 9.0]]), torch.tensor([[True, True, False]])
    zeros = torch.zeros_like(x)
    assert value_loss(x, zeros, zeros, mask, clip=None).item() == 5.0
    assert value_loss(x, zeros, zeros, mask, clip=None, normalizer=torch.tensor(4)).item() == 2.5
    assert policy_loss(zeros, zeros, x, mask, normalizer=4, **CLIPS).item() == -1.5


@pytest.mark.parametrize("normalizer", [None, 0, 7])
def test_without_a_token_that_counts_losses_are_zero_and_differentiable(normalizer: int | None) -> None:
    x = torch.tensor([[1.0, math.nan]], requires_grad=True)
    rest, mask = torch.tensor([[2.0, math.inf]]), torch.zeros(1, 2, dtype=torch.bool)
    loss = policy_loss(x, rest, rest, mask, normalizer=normalizer, dual_clip=3.0, **CLIPS)
    loss = loss + value_loss(x, rest, rest, mask, clip=0.2, normalizer=normalizer)
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_slots_poison_neither_loss_nor_gradient(poison: float) -> None:
    *tensors, mask = draw(2)
    logprobs, old, advantages, weights = (torch.where(mask, x, poison) for x in tensors)
    logprobs.requires_grad_()
    options = {**CLIPS, "dual_clip": 1.5, "importance_weights": weights}
    surrogate = policy_loss(logprobs, old, advantages, mask, **options)
    errors = value_loss(logprobs, old, advantages, mask, clip=0.2)
    (surrogate + errors).backward()
    expected = loop_policy_loss(logprobs, old, advantages, mask, **options)
    assert surrogate.item() == pytest.approx(expected, abs=1e-9)
    assert errors.item() == pytest.approx(loop_value_loss(logprobs, old, advantages, mask, clip=0.2), abs=1e-9)
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert not logprobs.grad[~mask].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low=-0\.1"),
        ({"clip_high": math.nan}, "clip_high=nan"),
        ({"dual_clip": 1.0}, r"dual_clip=1\.0.*or None"),
        ({"normalizer": 0}, "normalizer=0.*24 tokens count.*whole minibatch"),
        ({"normalizer": -3.0}, r"normalizer=-3\.0"),
        ({"importance_weights": torch.ones(4, 1)}, r"importance_weights has shape \(4, 1\)"),
    ],
)
def test_impossible_policy_losses_are_refused(change: dict[str, Any], message: str) -> None:
    x, mask = torch.zeros(4, 6), torch.ones(4, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        policy_loss(x, x, x, mask, **{**CLIPS, **change})


def test_impossible_value_losses_are_refused() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"clip=-0\.5.*None for no clipping"):
        value_loss(x, x, x, mask, clip=-0.5)
    with pytest.raises(ValueError, match=r"returns has shape \(2, 1\).*response_mask has shape \(2, 3\)"):
        value_loss(x, x, x[:, :1], mask, clip=None)
    with pytest.raises(ValueError, match=r"response_mask has dtype torch\.float32.*response_mask != 0"):
        value_loss(x, x, x, mask.float(), clip=None)
