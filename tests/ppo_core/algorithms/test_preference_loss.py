"""The loss on preferences against loops from the papers' equations, and what is measured of their scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ppo_core.algorithms.preferences import pairs_of, preference_loss
from ppo_core.records import InputError
from ppo_core.scoring.preferences import CALIBRATION_BINS, calibration, distribution, pair_metrics

ROWS = [[0.3, -1.2], [2.0, 0.1, 0.4, -3.0], [-0.5, 0.5], [1.0, 0.0, -0.7]]
MARGINS = [0.0, 0.0, 0.25, 0.0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_the_equations(rows: list[list[float]], margins: list[float], smoothing: float, centring: float) -> float:
    """The sum over rows of -1/(K over 2) sum_{i<j} …, in float64 (see the module of the loss)."""
    total = 0.0
    for scores, margin in zip(rows, margins, strict=True):
        size, row = len(scores), 0.0
        for i in range(size):
            for j in range(i + 1, size):
                better, worse = scores[i], scores[j]
                row -= (1 - smoothing) * math.log(sigmoid(better - worse - margin))
                row -= smoothing * math.log(sigmoid(worse - better - margin))
                row += centring * (better + worse) ** 2
        total += row / (size * (size - 1) / 2)
    return total


def ours(smoothing: float, centring: float, scores: torch.Tensor | None = None) -> torch.Tensor:
    flat = torch.tensor([score for row in ROWS for score in row]) if scores is None else scores
    pairs = pairs_of([len(row) for row in ROWS])
    return preference_loss(flat, torch.tensor(MARGINS), pairs, label_smoothing=smoothing, centring=centring)


@pytest.mark.parametrize(("smoothing", "centring"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.01), (0.1, 0.3)])
def test_the_loss_is_that_of_the_papers(smoothing: float, centring: float) -> None:
    expected = by_the_equations(ROWS, MARGINS, smoothing, centring)
    assert float(ours(smoothing, centring)) == pytest.approx(expected, abs=1e-5)


def wrong_way_round(rows: list[list[float]], *rest: Any) -> float:
    return by_the_equations([row[::-1] for row in rows], *rest)


def sum_over_pairs(rows: list[list[float]], margins: list[float], *rest: float) -> float:
    """InstructGPT's equation without its 1/(K over 2)."""
    counts = [math.comb(len(row), 2) for row in rows]
    each = [by_the_equations([row], [margin], *rest) for row, margin in zip(rows, margins, strict=True)]
    return sum(count * loss for count, loss in zip(counts, each, strict=True))


def added_margin(rows: list[list[float]], margins: list[float], *rest: float) -> float:
    return by_the_equations(rows, [-margin for margin in margins], *rest)


@pytest.mark.parametrize("mutant", [wrong_way_round, sum_over_pairs, added_margin])
def test_the_oracle_tells_a_wrong_loss(mutant: Callable[..., float]) -> None:
    assert abs(float(ours(0.1, 0.01)) - mutant(ROWS, MARGINS, 0.1, 0.01)) > 0.05


def test_the_gradient_is_that_of_finite_differences() -> None:
    flat = [score for row in ROWS for score in row]
    scores = torch.tensor(flat, requires_grad=True)
    ours(0.1, 0.05, scores).backward()
    assert scores.grad is not None

    def at(values: list[float]) -> float:
        parts = iter(values)
        return by_the_equations([[next(parts) for _ in row] for row in ROWS], MARGINS, 0.1, 0.05)

    for index, found in enumerate(scores.grad.tolist()):
        up, down = ([v + (step if n == index else 0) for n, v in enumerate(flat)] for step in (1e-5, -1e-5))
        assert found == pytest.approx((at(up) - at(down)) / 2e-5, abs=1e-5)


def test_metrics_are_those_worked_out_by_hand() -> None:
    scores = [[1.0, 0.0], [0.0, 2.0], [1.0, 0.5, 1.0]]
    found = pair_metrics(scores)
    differences = [1.0, -2.0, 0.5, 0.0, -0.5]
    assert found["reward_model/accuracy"] == pytest.approx(2 / 5)  # a tie is no hit
    assert found["reward_model/margin"] == pytest.approx(-1 / 5)
    assert found["reward_model/log_loss"] == pytest.approx(sum(-math.log(sigmoid(d)) for d in differences) / 5)
    assert found["reward_model/score_mean"] == pytest.approx(5.5 / 7)
    bins = calibration(scores)
    expected = {
        (1, sigmoid(0.0), 0.0),
        (2, sigmoid(0.5), 0.5),
        (1, sigmoid(1.0), 1.0),
        (1, sigmoid(2.0), 0.0),
    }
    assert {(b["count"], round(b["confidence"], 9), b["accuracy"]) for b in bins} == {
        (count, round(sure, 9), right) for count, sure, right in expected
    }
    error = sum(count * abs(right - sure) for count, sure, right in expected) / 5
    assert found["reward_model/calibration_error"] == pytest.approx(error)


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InputError, match=r"held-out row 2 with \[1.0, nan\], which is not finite: .* lower fit"):
        pair_metrics([[1.0, 0.0], [1.0, math.nan]])


def test_calibrated_scores_have_no_error_and_certain_ones_fit_into_the_last_bin() -> None:
    right = math.log(0.75 / 0.25)
    rows = [[right, 0.0]] * 3 + [[0.0, right]]
    assert pair_metrics(rows)["reward_model/calibration_error"] == pytest.approx(0.0, abs=1e-12)
    assert [b["count"] for b in calibration([[1000.0, 0.0]])] == [1]
    assert len(calibration([[x / 10, 0.0] for x in range(100)])) == CALIBRATION_BINS


def test_the_distribution_counts_every_response_once() -> None:
    spread = distribution(ROWS)
    assert (sum(spread["best"]), sum(spread["others"])) == (4, 7)
    assert (spread["edges"][0], spread["edges"][-1]) == (-3.0, 2.0)
