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
from ppo_core.off_policy import importance

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
