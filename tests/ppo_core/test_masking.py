"""Statistics over the slots that count, against Python's own `statistics` in float64 and closed forms."""

from __future__ import annotations

import doctest
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core import masking
from ppo_core.masking import check_rows, masked_mean, masked_var, scale, whiten

X = torch.tensor([[1.0, 2.0, 4.0], [8.0, 100.0, math.nan]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
KEPT = [1.0, 2.0, 4.0, 8.0]
NOTHING = torch.zeros(2, 3, dtype=torch.bool)

cells = st.lists(st.tuples(st.integers(-1000, 1000), st.booleans()), min_size=1, max_size=12)


def test_docstring_examples() -> None:
    assert doctest.testmod(masking) == (0, 4)


def test_mean_counts_only_true_slots() -> None:
    assert masked_mean(X, MASK).item() == 3.75


def test_mean_along_a_dimension_divides_each_line_by_its_own_count() -> None:
    torch.testing.assert_close(masked_mean(X, MASK, dim=1), torch.tensor([7 / 3, 8.0]))
    torch.testing.assert_close(masked_mean(X, MASK, dim=0), torch.tensor([4.5, 2.0, 4.0]))


def test_variance_is_unbiased() -> None:
    # Deviations from 3.75: -2.75, -1.75, 0.25, 4.25; squares sum to 28.75; three degrees of freedom.
    assert masked_var(X, MASK).item() == pytest.approx(28.75 / 3, rel=1e-6)


@given(cells)
@settings(max_examples=50, deadline=None)
def test_mean_and_variance_are_those_of_the_kept_numbers(rows: list[tuple[int, bool]]) -> None:
    x = torch.tensor([number / 8 for number, _ in rows], dtype=torch.float64)
    mask = torch.tensor([counts for _, counts in rows])
    kept = [number / 8 for number, counts in rows if counts]
    assert masked_mean(x, mask).item() == pytest.approx(statistics.fmean(kept) if kept else 0.0, abs=1e-9)
    expected = statistics.variance(kept) if len(kept) > 1 else 0.0
    assert masked_var(x, mask).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_scales_by_the_unbiased_deviation(shift_mean: bool) -> None:
    deviation = math.sqrt(28.75 / 3 + 1e-8)
    kept = [(x - 3.75) / deviation + (0.0 if shift_mean else 3.75) for x in KEPT]
    expected = torch.tensor([kept[:3], [kept[3], 0.0, 0.0]])
    torch.testing.assert_close(whiten(X, MASK, shift_mean=shift_mean), expected, rtol=1e-5, atol=1e-6)


@given(cells)
def test_scale_divides_by_the_root_mean_square(rows: list[tuple[int, bool]]) -> None:
    x = torch.tensor([number / 8 for number, _ in rows], dtype=torch.float64)
    mask = torch.tensor([counts for _, counts in rows])
    squares = [(number / 8) ** 2 for number, counts in rows if counts]
    root = math.sqrt(statistics.fmean(squares) + 1e-8) if squares else 1.0
    expected = [number / 8 / root if counts else 0.0 for number, counts in rows]
    assert scale(x, mask).tolist() == pytest.approx(expected, abs=1e-9)


def test_whiten_shifts_the_mean_by_default() -> None:
    kept = whiten(X, MASK)[MASK].double()
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert kept.var().item() == pytest.approx(1.0, abs=1e-5)


def test_the_epsilon_is_added_to_the_variance() -> None:
    # Variance of (0, 2e-4) is 2e-8, plus 1e-8: the ends stand 1e-4 / sqrt(3e-8) = 1 / sqrt(3) from the mean.
    x = torch.tensor([[0.0, 2e-4]], dtype=torch.float64)
    expected = torch.tensor([[-1.0, 1.0]], dtype=torch.float64) / math.sqrt(3)
    torch.testing.assert_close(whiten(x, torch.tensor([[True, True]])), expected)


def test_one_slot_has_variance_zero_and_whitens_to_zero_or_its_mean() -> None:
    mask = torch.tensor([[False, True, False], [False, False, False]])
    assert masked_var(X, mask).item() == 0.0
    assert whiten(X, mask).tolist() == [[0.0] * 3] * 2
    assert whiten(X, mask, shift_mean=False).tolist() == [[0.0, 2.0, 0.0], [0.0] * 3]


def test_masks_all_false_give_zeros() -> None:
    assert masked_mean(X, NOTHING).item() == 0.0
    assert masked_mean(X, NOTHING, dim=1).tolist() == [0.0, 0.0]
    assert masked_var(X, NOTHING).item() == 0.0
    assert whiten(X, NOTHING).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_slots_poison_neither_result_nor_gradient(poison: float) -> None:
    clean = torch.where(MASK, X, 0.0).requires_grad_()
    dirty = torch.where(MASK, X, poison).requires_grad_()
    for x in (clean, dirty):
        (masked_mean(x, MASK) + masked_var(x, MASK) + whiten(x, MASK).square().sum() + whiten(x, MASK)[0, 0]).backward()
    assert torch.equal(whiten(dirty, MASK), whiten(clean, MASK))
    assert clean.grad is not None
    assert dirty.grad is not None
    assert torch.equal(dirty.grad, clean.grad)
    assert dirty.grad[~MASK].tolist() == [0.0, 0.0]


def test_half_precision_is_computed_in_float32_and_float64_stays() -> None:
    assert masked_mean(X.to(torch.bfloat16), MASK).dtype == torch.float32
    assert whiten(X.double(), MASK).dtype == torch.float64


@pytest.mark.parametrize("function", [masked_mean, masked_var, whiten])
def test_masks_that_are_not_bool_are_refused_with_the_remedy(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"mask has dtype torch\.int64.*pass mask != 0"):
        function(X, MASK.long())


@pytest.mark.parametrize("function", [masked_mean, masked_var, whiten])
def test_shapes_that_differ_are_named(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\).*mask has shape \(2, 1\).*align"):
        function(X, MASK[:, :1])


def test_rows_need_a_matrix_and_one_number_each() -> None:
    with pytest.raises(ValueError, match=r"response_mask has shape \(3,\).*\[B, R\]"):
        check_rows("response_mask", MASK[0])
    with pytest.raises(ValueError, match=r"scores has shape \(3,\).*2 rows.*shape \(2,\)"):
        check_rows("response_mask", MASK, scores=torch.zeros(3))
