"""How losses are added up: against loops, and the same however a minibatch is cut."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core import aggregation
from ppo_core.aggregation import Aggregation, divisor, token_weights
from ppo_core.losses import weighted_mean
from tests.ppo_core.plain_torch import FIXED_LENGTH, plain_mean

KINDS: list[Aggregation] = ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Terms and a mask of six rows: two count nowhere, one has a hole."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[t < count for t in range(5)] for count in (5, 0, 1, 3, 4, 0)])
    mask[0, 2] = False
    return torch.randn(mask.shape, generator=generator), mask


def aggregated(terms: Tensor, mask: Tensor, kind: Aggregation, number: int) -> Tensor:
    return weighted_mean(terms, mask, weights=token_weights(mask, kind), normalizer=number)


def test_docstring_examples() -> None:
    assert doctest.testmod(aggregation) == (0, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_mean_that_it_is_called(kind: Aggregation) -> None:
    terms, mask = batch(0)
    plain = plain_mean([(b, terms[b, t].double()) for b, t in mask.nonzero().tolist()], kind)
    observed = aggregated(terms, mask, kind, divisor(mask, kind, length=FIXED_LENGTH)).double()
    torch.testing.assert_close(observed, plain, rtol=0, atol=1e-6)


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 99), order=st.permutations(range(6)), cut=st.integers(1, 5))
def test_the_parts_of_a_minibatch_add_up_to_it(kind: Aggregation, seed: int, order: list[int], cut: int) -> None:
    terms, mask = batch(seed)
    number = divisor(mask, kind, length=7)
    parts = [aggregated(terms[rows], mask[rows], kind, number) for rows in (order[:cut], order[cut:])]
    torch.testing.assert_close(parts[0] + parts[1], aggregated(terms, mask, kind, number), rtol=0, atol=1e-5)
    assert sum(divisor(mask[rows], kind, length=7) for rows in (order[:cut], order[cut:])) == number


@given(length=st.integers(1, 5), seed=st.integers(0, 99))
def test_of_equal_lengths_the_means_are_one(length: int, seed: int) -> None:
    terms = torch.randn((4, 5), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(5) < length).expand(4, 5)
    tokens, means = (aggregated(terms, mask, kind, divisor(mask, kind)) for kind in (KINDS[0], KINDS[2]))
    torch.testing.assert_close(tokens, means, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_counts_the_sum_is_zero(kind: Aggregation) -> None:
    terms, mask = torch.full((2, 3), torch.nan), torch.zeros((2, 3), dtype=torch.bool)
    assert divisor(mask, kind, length=7) == 0
    assert float(aggregated(terms, mask, kind, 0)) == 0.0


def test_a_fixed_length_is_asked_for() -> None:
    with pytest.raises(ValueError, match="aggregation='fixed_length' needs the length"):
        divisor(torch.ones((1, 1), dtype=torch.bool), "fixed_length")


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    mask = torch.ones((1, 1), dtype=torch.bool)
    for call in (token_weights, divisor):
        with pytest.raises(ValueError, match="aggregation='mean' is unknown: choose one of token_mean, sequence_mean"):
            call(mask, "mean")  # type: ignore[arg-type]
