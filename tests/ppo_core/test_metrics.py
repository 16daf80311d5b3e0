"""Metrics at hand-computed points, and their exactness over any cut of a batch."""

from __future__ import annotations

import doctest
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core import metrics
from ppo_core.losses import policy_loss
from ppo_core.metrics import (
    Maximum,
    Mean,
    approximate_kl,
    clip_fraction,
    explained_variance,
    ratio_maximum,
    value_clip_fraction,
)

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
# Ratios 1.5, 1.5, 0.5, 0.5, 1.1 and one masked slot; old logprobs are 0.
RATIOS = [1.5, 1.5, 0.5, 0.5, 1.1]
LOGPROBS = torch.tensor([[math.log(r) for r in RATIOS] + [math.nan]])
OLD = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, math.inf]])
ADVANTAGES = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, math.nan]])
MASK = torch.tensor([[True] * 5 + [False]])
NOTHING = torch.zeros_like(MASK)


def test_docstring_examples() -> None:
    assert doctest.testmod(metrics) == (0, 9)


def test_means_weigh_their_parts_by_count() -> None:
    parts = [Mean(6.0, 3), Mean(2.0, 1), Mean()]
    assert sum(parts, Mean()) == Mean(8.0, 4)
    assert sum(parts, Mean()).value == 2.0


def test_maxima_continue_and_keep_a_nan_in_either_order() -> None:
    assert (Maximum(-3.0) + Maximum(-5.0)).value == -3.0
    assert (Maximum() + Maximum(-5.0)).value == -5.0
    assert math.isnan((Maximum(math.nan) + Maximum(1.0)).value)
    assert math.isnan((Maximum(1.0) + Maximum(math.nan)).value)


def test_nothing_counted_is_the_neutral_element_and_reads_zero() -> None:
    x = torch.full_like(LOGPROBS, math.nan)
    assert Mean.over(x, NOTHING) == Mean() == Mean(0.0, 0.0)
    assert Maximum.over(x, NOTHING) == Maximum()
    assert Mean().value == 0.0
    assert Maximum().value == 0.0


@given(st.lists(st.integers(-100, 100), min_size=2, max_size=12), st.data())
@settings(max_examples=40, deadline=None)
def test_parts_add_up_to_the_whole(numbers: list[int], data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    cut = data.draw(st.integers(0, len(numbers)))
    x, mask = torch.tensor([numbers]) / 8, torch.tensor([keep])
    kept = [number / 8 for number, counts in zip(numbers, keep, strict=True) if counts]
    assert Mean.over(x[:, :cut], mask[:, :cut]) + Mean.over(x[:, cut:], mask[:, cut:]) == Mean(sum(kept), len(kept))
    maximum = Maximum.over(x[:, :cut], mask[:, :cut]) + Maximum.over(x[:, cut:], mask[:, cut:])
    assert maximum == Maximum(max(kept, default=-math.inf))


def test_a_mean_over_many_tokens_is_summed_in_float64() -> None:
    # 2**24 + 1 is no float32: a float32 sum would lose the ones.
    x = torch.tensor([[2.0**24, 1.0, 1.0, 1.0]])
    assert Mean.over(x, torch.ones_like(x, dtype=torch.bool)).total == 2.0**24 + 3


def test_only_clips_that_bind_are_counted() -> None:
    # Bound: ratio 1.5 with A > 0 and ratio 0.5 with A < 0. Neither 1.5 with A < 0 nor 0.5 with A > 0 is.
    assert clip_fraction(LOGPROBS, OLD, ADVANTAGES, MASK, **CLIPS) == Mean(2.0, 5.0)


def test_the_two_clips_are_not_exchanged() -> None:
    logprobs = torch.tensor([[math.log(1.25), math.log(0.75)]])
    arguments = logprobs, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]])
    assert clip_fraction(*arguments, clip_low=0.2, clip_high=0.3).total == 1.0
    assert clip_fraction(*arguments, clip_low=0.3, clip_high=0.3).total == 0.0
    assert clip_fraction(*arguments, clip_low=0.2, clip_high=0.2).total == 2.0


def test_the_dual_clip_counts_where_the_loss_has_no_gradient() -> None:
    ratios = torch.tensor([[4.0, 4.0, 2.0, 0.5]])
    logprobs, advantages = ratios.log().requires_grad_(), torch.tensor([[-1.0, 1.0, -1.0, -1.0]])
    mask, clips = torch.ones((1, 4), dtype=torch.bool), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    policy_loss(logprobs, torch.zeros(1, 4), advantages, mask, **clips).backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).tolist() == [[True, True, False, True]]
    assert clip_fraction(logprobs, torch.zeros(1, 4), advantages, mask, **clips) == Mean(3.0, 4.0)


def test_only_value_clips_that_bind_are_counted() -> None:
    # Old value 2, clip 0.5. 3 -> 2.5: farther from 4, nearer to 2; 2.2 is not clipped; the last slot does not count.
    values = torch.tensor([[3.0, 3.0, 2.2, math.nan]])
    old, returns = torch.full((1, 4), 2.0), torch.tensor([[4.0, 2.0, 4.0, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    assert value_clip_fraction(values, old, returns, mask, clip=0.5) == Mean(1.0, 3.0)


def test_approximate_kl_is_k3_of_old_to_new() -> None:
    expected = sum(r - 1 - math.log(r) for r in RATIOS)
    observed = approximate_kl(LOGPROBS, OLD, MASK)
    assert observed.total == pytest.approx(expected, abs=1e-5)
    assert observed.count == 5.0


def test_approximate_kl_is_unbiased_for_samples_of_the_old_policy() -> None:
    # 2000 tokens, drawn exactly in the proportions of the old policy: the mean is KL(old, new) itself.
    old, new, counts = [0.5, 0.25, 0.25], [0.125, 0.625, 0.25], [1000, 500, 500]
    tokens = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    logprobs = torch.tensor(new, dtype=torch.float64).log()[tokens].unsqueeze(0)
    old_logprobs = torch.tensor(old, dtype=torch.float64).log()[tokens].unsqueeze(0)
    divergence = sum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    observed = approximate_kl(logprobs, old_logprobs, torch.ones_like(logprobs, dtype=torch.bool))
    assert observed.value == pytest.approx(divergence, abs=1e-12)


def test_the_largest_ratio() -> None:
    assert ratio_maximum(LOGPROBS, OLD, MASK).value == pytest.approx(1.5, abs=1e-6)


def test_a_huge_log_ratio_is_measured_as_finite() -> None:
    arguments = torch.tensor([[900.0]]), torch.zeros(1, 1), torch.tensor([[True]])
    assert math.isfinite(ratio_maximum(*arguments).value)
    assert math.isfinite(approximate_kl(*arguments).value)


def test_explained_variance_is_one_minus_the_ratio_of_variances() -> None:
    returns, values = [1.0, 2.0, 4.0, 8.0], [1.5, 1.0, 4.0, 6.0]
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    expected = 1 - statistics.variance(errors) / statistics.variance(returns)
    mask = torch.tensor([[True] * 4 + [False]])
    observed = explained_variance(torch.tensor([[*values, math.nan]]), torch.tensor([[*returns, math.nan]]), mask)
    assert observed == pytest.approx(expected, abs=1e-12)


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 0.1), returns, mask) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0, abs=1e-12)


@pytest.mark.parametrize("kept", [0, 1, 7])
def test_returns_without_variance_are_explained_to_zero(kept: int) -> None:
    mask = (torch.arange(7) < kept).unsqueeze(0)
    assert explained_variance(torch.randn(1, 7), torch.full((1, 7), 0.1), mask) == 0.0


def test_shapes_masks_and_clips_are_checked() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask has dtype torch\.int64"):
        Mean.over(x, mask.long())
    with pytest.raises(ValueError, match=r"x has shape \(2, 2\)"):
        Maximum.over(x[:, :2], mask)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 1\)"):
        clip_fraction(x, x, x[:, :1], mask, **CLIPS)
    with pytest.raises(ValueError, match=r"clip_high=-1\.0"):
        clip_fraction(x, x, x, mask, clip_low=0.2, clip_high=-1.0)
    with pytest.raises(ValueError, match=r"clip=-1\.0"):
        value_clip_fraction(x, x, x, mask, clip=-1.0)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(3,\)"):
        approximate_kl(x, x[0], mask)
    with pytest.raises(ValueError, match=r"returns has shape \(3,\)"):
        explained_variance(x, x[0], mask)


def test_returns_that_differ_by_rounding_are_explained_to_zero() -> None:
    """Returns made as advantage plus value, in float32, where all scores are 0 and lambda is 1."""
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    returns = (0.0 - values) + values + torch.randn(64, 8) * 1e-8
    mask = torch.ones(64, 8, dtype=torch.bool)
    assert explained_variance(values, returns, mask) == 0.0
    assert explained_variance(values, returns + values * 1e-3, mask) < 0.0
