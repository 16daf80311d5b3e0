"""PPO with a price on leaving the old policy: its loss by loops and in closed form, its controller, its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core import kl, losses
from ppo_core.algorithms.registry import algorithm_of
from ppo_core.kl import PENALTY_BOUNDS, next_penalty_coef
from ppo_core.losses import penalised_policy_loss, policy_loss
from ppo_core.spec import KlPenaltyPpoSpec
from tests.ppo_core.algorithms.test_rloo import mutated
from tests.ppo_core.test_losses import draw, partitions, seeds


def plain_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, coef: float) -> float:
    """-(rho A - coef (rho - 1 - log rho)), weighted, over the tokens that count."""
    terms = []
    for b, t in mask.nonzero().tolist():
        log_ratio = float(logprobs[b, t] - old[b, t])
        ratio = math.exp(log_ratio)
        terms.append(float(weights[b, t]) * (coef * (ratio - 1 - log_ratio) - ratio * float(advantages[b, t])))
    return sum(terms) / len(terms)


def assert_of_the_paper(candidate: Any, seed: int, coef: float) -> None:
    logprobs, old, advantages, weights, mask = draw(seed)
    observed = candidate(logprobs, old, advantages, mask, coef=coef, importance_weights=weights)
    assert observed.item() == pytest.approx(plain_loss(logprobs, old, advantages, weights, mask, coef), abs=1e-9)


@given(seeds, st.sampled_from([0.0, 0.5, 3.0]))
def test_the_loss_is_that_of_the_paper(seed: int, coef: float) -> None:
    assert_of_the_paper(penalised_policy_loss, seed, coef)


@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("coef * kl - log_ratio.exp()", "coef * kl + log_ratio.exp()"),
        ("coef * kl - log_ratio.exp()", "-coef * kl - log_ratio.exp()"),
        ("torch.expm1(log_ratio) - log_ratio", "torch.expm1(log_ratio) + log_ratio"),
    ],
)
def test_a_wrong_loss_is_noticed(original: str, replacement: str) -> None:
    with pytest.raises(AssertionError):
        assert_of_the_paper(mutated(losses, original, replacement).penalised_policy_loss, 0, 3.0)


@given(seeds)
def test_without_a_price_and_on_policy_the_gradient_is_the_plain_policy_gradient(seed: int) -> None:
    """-A / n at each token that counts; with a price as well, for at the old policy the KL is at its lowest."""
    logprobs, _, advantages, _, mask = draw(seed)
    for coef in (0.0, 5.0):
        here = logprobs.clone().requires_grad_()
        penalised_policy_loss(here, logprobs, advantages, mask, coef=coef).backward()
        expected = torch.where(mask, -advantages / mask.sum(), 0.0)
        torch.testing.assert_close(here.grad, expected, rtol=0, atol=1e-12)


@given(seeds)
def test_without_a_price_it_is_ppo_whose_clip_never_binds(seed: int) -> None:
    logprobs, old, advantages, _, mask = draw(seed)
    free = penalised_policy_loss(logprobs, old, advantages, mask, coef=0.0)
    unclipped = policy_loss(logprobs, old, advantages, mask, clip_low=1.0, clip_high=1e9)
    torch.testing.assert_close(free, unclipped, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_the_price_is_that_of_the_divergence() -> None:
    """Over all tokens, weighted by the old policy p: grad KL(p, softmax(theta)) = softmax(theta) - p."""
    theta = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    logprobs = theta.log_softmax(0)[None]
    zero = torch.zeros_like(logprobs)
    penalised_policy_loss(
        logprobs, p.log()[None], zero, mask, coef=1.0, importance_weights=p[None], normalizer=1
    ).backward()
    torch.testing.assert_close(theta.grad, theta.detach().softmax(0) - p, rtol=0, atol=1e-12)


@given(seeds, partitions())
def test_the_cut_into_microbatches_changes_nothing(seed: int, parts: list[list[int]]) -> None:
    logprobs, old, advantages, weights, mask = draw(seed, batch=6)

    def total(rows: list[int]) -> Tensor:
        given_ = logprobs[rows], old[rows], advantages[rows], mask[rows]
        return penalised_policy_loss(*given_, coef=2.0, importance_weights=weights[rows], normalizer=int(mask.sum()))

    torch.testing.assert_close(torch.stack([total(rows) for rows in parts]).sum(), total(list(range(6))))


@pytest.mark.parametrize(
    ("observed", "expected"),
    [(0.0, 2.0), (0.0066, 2.0), (0.0067, 4.0), (0.01, 4.0), (0.0149, 4.0), (0.0151, 8.0), (1.0, 8.0)],
)
def test_the_price_follows_the_divergence(observed: float, expected: float) -> None:
    """Target 0.01: half below 0.01 / 1.5 = 0.00667, twice above 0.015."""
    assert next_penalty_coef(4.0, observed, target=0.01) == expected
    carry = algorithm_of(KlPenaltyPpoSpec(coef=4.0, target=0.01)).carry
    assert carry is not None
    assert carry(observed) == {"coef": expected}
    with pytest.raises(AssertionError):
        assert (
            mutated(kl, "0.5 if observed_kl < target", "2.0 if observed_kl < target").next_penalty_coef(
                4.0, 0.0, target=0.01
            )
            == 2.0
        )


def test_the_price_never_leaves_its_bounds_and_the_spec_takes_them() -> None:
    low = high = 1.0
    for _ in range(2000):
        low, high = next_penalty_coef(low, 0.0, target=0.01), next_penalty_coef(high, 9.0, target=0.01)
    assert (low, high) == PENALTY_BOUNDS
    assert [KlPenaltyPpoSpec(coef=bound).coef for bound in PENALTY_BOUNDS] == [low, high]


def test_without_a_target_the_price_stays() -> None:
    carry = algorithm_of(KlPenaltyPpoSpec(target=None)).carry
    assert carry is not None
    assert carry(9.0) == {}


@pytest.mark.parametrize(("observed", "target"), [(math.nan, 0.01), (math.inf, 0.01), (0.1, 0.0)])
def test_what_cannot_steer_is_refused(observed: float, target: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        next_penalty_coef(1.0, observed, target=target)
