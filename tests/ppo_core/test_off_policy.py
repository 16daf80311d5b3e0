"""Weights for what sampler and trainer disagree on."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_core import off_policy
from ppo_core.algorithms.algorithm import Minibatch
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.models.forward import Outputs
from ppo_core.off_policy import importance
from ppo_core.spec import UpdateSpec

KINDS = ("token", "sequence", "mask")
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
GARBAGE = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, torch.nan], [torch.inf, torch.nan, -torch.inf]])
numbers = st.lists(st.floats(-3, 3, width=32), min_size=9, max_size=9).map(lambda x: torch.tensor(x).view(3, 3))


def test_the_examples_in_the_documentation_hold() -> None:
    assert doctest.testmod(off_policy).failed == 0


@pytest.mark.parametrize("kind", KINDS)
def test_where_both_agree_every_weight_is_exactly_one(kind: Any) -> None:
    logprobs = torch.full((3, 3), -1.3) + GARBAGE
    found = importance(logprobs, logprobs, MASK, kind, cap=1.0, floor=1.0)
    assert torch.equal(found.weights, MASK.float())
    assert not found.cut.any()


@given(trained=numbers, sampled=numbers)
def test_weights_are_the_ratios_within_their_bounds(trained: torch.Tensor, sampled: torch.Tensor) -> None:
    rows = {kind: importance(trained + GARBAGE, sampled, MASK, kind, cap=2.0, floor=0.5) for kind in KINDS}
    for b, t in MASK.nonzero().tolist():
        ratio = math.exp(float(trained[b, t].double() - sampled[b, t].double()))
        of_response = math.exp(float((trained[b].double() - sampled[b].double())[MASK[b]].sum()))
        if min(abs(value - bound) for value in (ratio, of_response) for bound in (2.0, 0.5)) < 1e-4:
            continue
        assert float(rows["token"].weights[b, t]) == pytest.approx(min(ratio, 2.0), rel=1e-4)
        assert float(rows["sequence"].weights[b, t]) == pytest.approx(min(of_response, 2.0), rel=1e-4)
        kept = 0.5 <= ratio <= 2.0
        assert float(rows["mask"].weights[b, t]) == pytest.approx(ratio if kept else 0.0, rel=1e-4)
        assert [bool(rows[kind].cut[b, t]) for kind in KINDS] == [ratio > 2, of_response > 2, not kept]
    for found in rows.values():
        assert not found.weights[~MASK].any()
        assert not found.cut[~MASK].any()


def test_weighted_by_the_sampler_an_expectation_is_the_trainers() -> None:
    sampler, trainer = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.4, 0.35, 0.25]]).double()
    values, mask = torch.tensor([[3.0, -1.0, 7.0]]).double(), torch.ones(1, 3, dtype=torch.bool)
    weights = importance(trainer.log(), sampler.log(), mask, "token", cap=10.0).weights
    assert float((sampler * weights * values).sum()) == pytest.approx(float((trainer * values).sum()))


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_a_kl_of_the_samplers_tokens_has_the_gradient_of_the_policys_kl(estimator: Any) -> None:
    """A sampler with 1/2, 1/4, 1/4 draws tokens 0, 0, 1, 2; with p the policy, grad KL(p, q) = p (log p/q - KL)."""
    sampler, tokens = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), torch.tensor([0, 0, 1, 2])
    theta = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64, requires_grad=True)
    log_q, mask = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log(), torch.ones(4, 1, dtype=torch.bool)
    log_p = theta.log_softmax(0)
    logprobs = log_p[tokens, None]
    weights = importance(logprobs, sampler.log()[tokens, None], mask, "token", cap=10.0)
    minibatch = Minibatch(
        mask, logprobs.detach(), torch.zeros(4, 1), reference_logprobs=log_q[tokens, None], importance=weights
    )
    spec = UpdateSpec(kl_loss_coef=0.3, kl_loss_estimator=estimator, importance_correction="token", importance_cap=10)
    loss = CLIPPED_SURROGATE.loss(Outputs(logprobs=logprobs, entropy=torch.zeros(4, 1)), minibatch, spec, 4).total
    loss.backward()
    p, ratio = log_p.detach().exp(), log_p.detach() - log_q
    kl = float((p * ratio).sum())
    torch.testing.assert_close(theta.grad, 0.3 * p * (ratio - kl), rtol=0, atol=1e-6)
    if estimator != "k2":  # which is of low variance, and biased
        assert float(loss.detach()) == pytest.approx(0.3 * kl, abs=1e-6)


def test_no_gradient_flows_through_a_weight() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    assert not importance(logprobs, logprobs - 0.1, MASK[:1, :2], "token", cap=2.0).weights.requires_grad


@pytest.mark.parametrize(
    ("kind", "bounds", "message"),
    [
        ("tokens", {"cap": 2.0}, "correction='tokens' is unknown: choose one of token, sequence, mask"),
        ("token", {"cap": 0.9}, "cap=0.9 and floor=0.0 must have 1 between them"),
        ("mask", {"cap": 2.0, "floor": 1.1}, "floor=1.1 must have 1 between them"),
    ],
)
def test_bounds_without_one_between_them_are_refused(kind: Any, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        importance(torch.zeros(3, 3), torch.zeros(3, 3), MASK, kind, **bounds)
