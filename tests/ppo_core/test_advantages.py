"""GAE against closed forms, the sum over discounted deltas of the paper, and its invariances."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core import advantages as module
from ppo_core.advantages import Advantages, gae, length_adaptive_lambda

seeds = st.integers(0, 2**32 - 1)
discounts = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


def sums_of_deltas(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float, bootstrap: list[float]
) -> tuple[Tensor, Tensor]:
    """Equation 16: A_t = sum over n of (gamma * lambda)**n * delta_{t + n}, over the tokens that count."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(len(mask)):
        slots = [t for t in range(mask.shape[1]) if mask[b, t]]
        row_values = [values[b, t].item() for t in slots] + [bootstrap[b]]
        deltas = [rewards[b, t].item() + gamma * row_values[i + 1] - row_values[i] for i, t in enumerate(slots)]
        for i, t in enumerate(slots):
            advantages[b, t] = sum((gamma * gae_lambda) ** n * delta for n, delta in enumerate(deltas[i:]))
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


def draw(seed: int, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, batch, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(batch, length, generator=generator) < 0.6
    return rewards, values, mask, torch.randn(batch, generator=generator, dtype=torch.float64)


def assert_equal(observed: Advantages, expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(observed.advantages, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(observed.returns, expected[1], rtol=1e-9, atol=1e-9)


def test_docstring_examples() -> None:
    assert doctest.testmod(module) == (0, 3)


@given(seeds)
@settings(max_examples=40)
def test_each_response_may_have_a_lambda_of_its_own(seed: int) -> None:
    rewards, values, mask, bootstrap = draw(seed, 3, 5)
    lambdas = [0.0, 0.7, 1.0]
    observed = gae(
        rewards,
        values,
        mask,
        gamma=0.9,
        gae_lambda=torch.tensor(lambdas, dtype=torch.float64),
        bootstrap_values=bootstrap,
    )
    for b, gae_lambda in enumerate(lambdas):
        row = slice(b, b + 1)
        expected = sums_of_deltas(rewards[row], values[row], mask[row], 0.9, gae_lambda, [float(bootstrap[b])])
        torch.testing.assert_close(observed.advantages[row], expected[0], rtol=1e-9, atol=1e-9)


@given(st.lists(st.lists(st.booleans(), min_size=40, max_size=40), min_size=1, max_size=4), st.floats(0.01, 3.0))
def test_a_lambda_by_length_gives_each_advantage_a_sum_of_weights_of_alpha_times_the_length(
    rows: list[list[bool]], alpha: float
) -> None:
    """The powers of lambda add up to 1 / (1 - lambda) = alpha * tokens, where that is more than 1; else lambda is 0."""
    for found, row in zip(length_adaptive_lambda(torch.tensor(rows), alpha=alpha).tolist(), rows, strict=True):
        assert 1 / (1 - found) == pytest.approx(max(alpha * max(sum(row), 1), 1.0), rel=1e-4)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_an_alpha_that_is_not_positive_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha=.* must be above 0"):
        length_adaptive_lambda(torch.ones(1, 1, dtype=torch.bool), alpha=alpha)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (0.5, 0.0)])
def test_constant_values_and_one_final_reward(gamma: float, gae_lambda: float) -> None:
    # Values v, reward 1 at the end of T = 4: delta = (gamma - 1) v, at the end 1 - v; A_t is a geometric sum of them.
    v, length, decay = 0.4, 4, gamma * gae_lambda
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1.0
    expected = [
        sum(decay**n * (gamma - 1) * v for n in range(length - 1 - t)) + decay ** (length - 1 - t) * (1 - v)
        for t in range(length)
    ]
    observed = gae(
        rewards,
        torch.full_like(rewards, v),
        torch.ones(1, length, dtype=torch.bool),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    assert observed.advantages[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert observed.returns[0].tolist() == pytest.approx([a + v for a in expected], abs=1e-12)


def test_lambda_one_gives_rewards_to_go_and_lambda_zero_one_step_errors() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0).returns.tolist() == [[7.0, 6.0, 4.0]]
    assert gae(rewards, values, mask, gamma=0.5, gae_lambda=0.0).advantages.tolist() == [[0.625, 1.8125, 3.875]]


def test_a_gap_costs_no_discount() -> None:
    # Five tokens around a gap of three, values 0.5 ... 0.9, last reward 1: each delta is 0.1, so the first advantage is
    # 0.1 * (1 + 0.95 + ... + 0.95**4) = 0.4524. A recursion that steps through the gap would arrive at 0.3256.
    mask = torch.tensor([[True, True, True, False, False, False, True, True]])
    values = torch.tensor([[0.5, 0.6, 0.7, 5.0, 5.0, 5.0, 0.8, 0.9]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 0.0, 1.0]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    assert advantages[0, 0].item() == pytest.approx(0.1 * (1 - 0.95**5) / 0.05, abs=1e-6)
    assert advantages[0, 0].item() == pytest.approx(0.4524, abs=1e-4)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@given(seeds, st.integers(1, 4), st.integers(1, 8), discounts, discounts, st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_batch_equals_the_sums_of_deltas(
    seed: int, batch: int, length: int, gamma: float, gae_lambda: float, truncated: bool
) -> None:
    rewards, values, mask, bootstrap = draw(seed, batch, length)
    expected = sums_of_deltas(
        rewards, values, mask, gamma, gae_lambda, bootstrap.tolist() if truncated else [0.0] * batch
    )
    bootstrap_values = bootstrap if truncated else None
    assert_equal(
        gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda, bootstrap_values=bootstrap_values), expected
    )


@given(seeds, st.integers(1, 8), discounts, discounts)
@settings(max_examples=40, deadline=None)
def test_removing_the_gaps_changes_nothing(seed: int, length: int, gamma: float, gae_lambda: float) -> None:
    rewards, values, mask, bootstrap = draw(seed, 1, length)
    options = {"gamma": gamma, "gae_lambda": gae_lambda, "bootstrap_values": bootstrap}
    with_gaps = gae(rewards, values, mask, **options)
    packed_mask = torch.ones(1, int(mask.sum()), dtype=torch.bool)
    packed = gae(rewards[mask].unsqueeze(0), values[mask].unsqueeze(0), packed_mask, **options)
    assert torch.equal(with_gaps.advantages[mask], packed.advantages[0])
    assert torch.equal(with_gaps.returns[mask], packed.returns[0])


@given(seeds, st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_rows_are_independent_and_right_padding_is_inert(seed: int, batch: int, length: int, padding: int) -> None:
    rewards, values, mask, bootstrap = draw(seed, batch, length)
    plain = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.95, bootstrap_values=bootstrap)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    filler = torch.full((batch, padding), 7.0, dtype=torch.float64)
    moved = gae(
        torch.cat([rewards, filler], 1)[order],
        torch.cat([values, filler], 1)[order],
        torch.cat([mask, torch.zeros_like(filler, dtype=torch.bool)], 1)[order],
        gamma=0.9,
        gae_lambda=0.95,
        bootstrap_values=bootstrap[order],
    )
    assert torch.equal(moved.advantages[:, :length], plain.advantages[order])
    assert torch.equal(moved.returns[:, :length], plain.returns[order])
    assert not moved.returns[:, length:].any()


def test_a_bootstrap_value_follows_the_last_token_that_counts() -> None:
    # One token, V = 0.5, r = 0: delta = 0.9 * 2 - 0.5; the second answer ended there, so its bootstrap is 0.
    mask = torch.tensor([[True, False], [True, False]])
    values = torch.full((2, 2), 0.5)
    observed = gae(
        torch.zeros(2, 2), values, mask, gamma=0.9, gae_lambda=0.95, bootstrap_values=torch.tensor([2.0, 0.0])
    )
    torch.testing.assert_close(observed.advantages, torch.tensor([[1.3, 0.0], [-0.5, 0.0]]))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_masked_slots_and_empty_rows_poison_nothing(poison: float) -> None:
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    rewards, values = torch.where(mask, 1.0, poison), torch.where(mask, 0.5, poison)
    observed = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0, bootstrap_values=torch.tensor([0.0, poison]))
    assert observed.advantages.tolist() == [[1.5, 0.0, 0.5, 0.0], [0.0] * 4]
    assert observed.returns.tolist() == [[2.0, 0.0, 1.0, 0.0], [0.0] * 4]


def test_results_are_constants_in_at_least_float32() -> None:
    values = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    observed = gae(values, values, torch.ones(1, 2, dtype=torch.bool), gamma=1.0, gae_lambda=1.0)
    assert not observed.returns.requires_grad
    assert observed.returns.dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"response_mask has dtype torch\.int64"):
        gae(x, x, mask.long(), gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match=r"values has shape \(2, 4\).*response_mask has shape \(2, 3\)"):
        gae(x, torch.zeros(2, 4), mask, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match=r"bootstrap_values has shape \(2, 3\).*shape \(2,\)"):
        gae(x, x, mask, gamma=1.0, gae_lambda=1.0, bootstrap_values=x)
    with pytest.raises(ValueError, match=r"must be \[B, R\]"):
        gae(x[0], x[0], mask[0], gamma=1.0, gae_lambda=1.0)


@pytest.mark.parametrize("factors", [{"gamma": 1.1, "gae_lambda": 1.0}, {"gamma": 1.0, "gae_lambda": -0.1}])
def test_discounts_outside_the_unit_interval_are_refused(factors: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"=(1\.1|-0\.1) lies outside \[0, 1\]"):
        gae(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), **factors)
