"""Reward shaping against hand-made examples and a loop over tokens."""

from __future__ import annotations

import doctest
import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core import rewards
from ppo_core.rewards import ScoreMoments, clip_scores, missing_eos_penalty, overlong_penalty, token_rewards

SCORES = torch.tensor([1.0, 2.0, 3.0])
KL = torch.tensor([[0.5, 1.0, 1.5, 2.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
# A full response; one that ends early and has a hole; an empty one.
MASK = torch.tensor([[True, True, True, True], [True, False, True, False], [False, False, False, False]])


def loop_token_rewards(
    scores: list[float], kl: list[list[float]], mask: list[list[bool]], kl_coef: float
) -> list[list[float]]:
    result = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        counted = [t for t, counts in enumerate(row) if counts]
        for t in counted:
            result[b][t] = -kl_coef * kl[b][t]
        if counted:
            result[b][counted[-1]] += scores[b]
    return result


def test_docstring_examples() -> None:
    assert doctest.testmod(rewards) == (0, 5)


def test_the_score_lands_on_the_last_token_that_counts() -> None:
    expected = [[-0.25, -0.5, -0.75, 0.0], [-0.5, 0.0, 1.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert token_rewards(SCORES, KL, MASK, kl_coef=0.5).tolist() == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_token_rewards_equal_the_loop_for_any_mask(seed: int, batch: int, length: int) -> None:
    draw = random.Random(seed)
    scores = [draw.gauss(0, 1) for _ in range(batch)]
    kl = [[draw.gauss(0, 1) for _ in range(length)] for _ in range(batch)]
    mask = [[draw.random() < 0.6 for _ in range(length)] for _ in range(batch)]
    expected = torch.tensor(loop_token_rewards(scores, kl, mask, 0.3), dtype=torch.float64)
    observed = token_rewards(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(kl, dtype=torch.float64),
        torch.tensor(mask),
        kl_coef=0.3,
    )
    torch.testing.assert_close(observed, expected)


def test_summed_rewards_are_the_score_minus_the_price_of_the_divergence() -> None:
    total = token_rewards(SCORES, KL, MASK, kl_coef=0.5).sum(1)
    assert total.tolist() == [1.0 - 0.5 * 5.0, 2.0 - 0.5 * 2.0, 0.0]


def test_outside_the_mask_rewards_are_exactly_zero_whatever_stands_there() -> None:
    poisoned_kl = torch.where(MASK, KL, math.nan)
    poisoned_scores = torch.tensor([1.0, 2.0, math.inf])  # the empty response's score
    observed = token_rewards(poisoned_scores, poisoned_kl, MASK, kl_coef=0.5)
    assert torch.equal(observed, token_rewards(SCORES, KL, MASK, kl_coef=0.5))


def test_extra_right_padding_changes_nothing() -> None:
    padded = token_rewards(SCORES, torch.nn.functional.pad(KL, (0, 3), value=9.0), pad_mask(3), kl_coef=0.5)
    assert torch.equal(padded[:, :4], token_rewards(SCORES, KL, MASK, kl_coef=0.5))
    assert not padded[:, 4:].any()


def pad_mask(slots: int) -> torch.Tensor:
    return torch.cat([MASK, torch.zeros(3, slots, dtype=torch.bool)], dim=1)


def test_rewards_are_constants() -> None:
    assert not token_rewards(SCORES, KL.clone().requires_grad_(), MASK, kl_coef=0.5).requires_grad


def test_token_rewards_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"response_mask has dtype torch\.float32"):
        token_rewards(SCORES, KL, MASK.float(), kl_coef=0.5)
    with pytest.raises(ValueError, match=r"kl has shape \(3, 3\)"):
        token_rewards(SCORES, KL[:, :3], MASK, kl_coef=0.5)
    with pytest.raises(ValueError, match=r"scores has shape \(3, 1\).*shape \(3,\)"):
        token_rewards(SCORES.unsqueeze(1), KL, MASK, kl_coef=0.5)


def test_only_unfinished_responses_pay_the_penalty() -> None:
    finished = torch.tensor([True, False, True])
    assert missing_eos_penalty(SCORES, finished, penalty=3.0).tolist() == [1.0, -1.0, 3.0]
    assert missing_eos_penalty(SCORES, finished, penalty=0.0).tolist() == SCORES.tolist()


def test_missing_eos_penalty_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"penalty=-1\.0.*pass its size, 1\.0"):
        missing_eos_penalty(SCORES, torch.tensor([True, False, True]), penalty=-1.0)
    with pytest.raises(ValueError, match=r"finished has dtype torch\.int64"):
        missing_eos_penalty(SCORES, torch.tensor([1, 0, 1]), penalty=1.0)
    with pytest.raises(ValueError, match=r"scores has shape \(3,\).*finished has shape \(2,\)"):
        missing_eos_penalty(SCORES, torch.tensor([True, False]), penalty=1.0)


@given(st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=5))
def test_the_moments_of_scores_are_those_of_all_at_once_however_they_came(batches: list[list[int]]) -> None:
    moments, scores = ScoreMoments(), [score / 8 for batch in batches for score in batch]
    for batch in batches:
        moments = moments.with_scores(torch.tensor([score / 8 for score in batch]))
    assert moments.seen == len(scores)
    assert moments.mean == pytest.approx(statistics.fmean(scores) if scores else 0.0, abs=1e-12)
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    assert moments.std == pytest.approx(deviation or 1.0, rel=1e-9)


def test_equal_scores_are_divided_by_nothing() -> None:
    moments = ScoreMoments()
    for _ in range(50):
        moments = moments.with_scores(torch.full((7,), 0.1))
    assert (moments.std, moments.mean) == (1.0, pytest.approx(0.1))


@pytest.mark.parametrize(("distance", "expected"), [(1e-5, 1.0), (1.4e-4, 1.0), (1.5e-4, 1.5e-4 / math.sqrt(2))])
def test_a_deviation_below_1e_4_divides_by_1(distance: float, expected: float) -> None:
    """That of two scores is their distance over the root of 2; scores are fp32."""
    assert ScoreMoments().with_scores(torch.tensor([0.0, distance])).std == pytest.approx(expected, rel=1e-6)


def test_scores_are_cut_on_both_sides() -> None:
    assert clip_scores(torch.tensor([-9.0, -2.0, 0.0, 1.5, 9.0]), limit=2.0).tolist() == [-2.0, -2.0, 0.0, 1.5, 2.0]


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_clip_scores_refuses_a_limit_that_is_not_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="limit="):
        clip_scores(SCORES, limit=limit)


def test_the_overlong_penalty_rises_through_the_buffer_and_is_capped_at_the_factor() -> None:
    # Limit 100, buffer 20: nothing up to 80; 85 is a quarter into the buffer; 100 and beyond cost the whole factor.
    lengths = torch.tensor([0, 80, 85, 95, 100, 140])
    expected = [0.0, 0.0, 0.125, 0.375, 0.5, 0.5]
    assert overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5).tolist() == expected


@pytest.mark.parametrize(
    ("buffer", "factor", "message"), [(0, 1.0, "buffer=0"), (101, 1.0, r"buffer=101.*100"), (20, -1.0, r"factor=-1\.0")]
)
def test_overlong_penalty_refuses_what_makes_no_sense(buffer: int, factor: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer, factor=factor)
