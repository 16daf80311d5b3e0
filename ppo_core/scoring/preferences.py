"""How well scores tell the better of two responses: accuracy, calibration and how they are spread.

Of a pair whose scores differ by d = better - worse the reward model holds the better one for better with probability
sigmoid(d) (Bradley and Terry). It is calibrated where, of the pairs that it is sure of with probability p, the part p
is right; the expected calibration error is the mean distance from that (Guo et al. 2017, arXiv:1706.04599, equation 3).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ppo_core.records import InputError

CALIBRATION_BINS = 10
HISTOGRAM_BINS = 20


def pair_metrics(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the scores of each row's responses, the best first; all pairs count alike. Log loss in nats.

    Raises InputError for a score that is not finite.
    """
    for number, row in enumerate(scores, 1):
        if not all(map(math.isfinite, row)):
            raise InputError(
                f"the reward model scores the responses of held-out row {number} with {[*row]}, which is not finite: "
                "its training has gone wrong; lower fit.learning_rate, or compute in float32"
            )
    differences = _differences(scores)
    every = [score for row in scores for score in row]
    return {
        "reward_model/accuracy": float(np.mean(differences > 0)),
        "reward_model/margin": float(np.mean(differences)),
        "reward_model/log_loss": float(np.mean(np.logaddexp(0.0, -differences))),
        "reward_model/calibration_error": _calibration_error(calibration(scores)),
        "reward_model/score_mean": statistics.fmean(every),
        "reward_model/score_std": statistics.pstdev(every),
    }


def calibration(scores: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Pairs by how sure the reward model is, from 0.5 to 1: how many, how sure on average, and which part is right.

    Bins without pairs are left out.
    """
    differences = _differences(scores)
    sure = 1 / (1 + np.exp(-np.abs(differences)))
    numbers = np.minimum(((sure - 0.5) * 2 * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    return [
        {
            "count": int((numbers == number).sum()),
            "confidence": float(sure[numbers == number].mean()),
            "accuracy": float((differences[numbers == number] > 0).mean()),
        }
        for number in sorted(set(numbers.tolist()))
    ]


def distribution(scores: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Histograms of the scores of each row's best response and of the others, over the same `edges`."""
    best, others = [row[0] for row in scores], [score for row in scores for score in row[1:]]
    edges = np.histogram_bin_edges([*best, *others], HISTOGRAM_BINS)
    counts = {name: np.histogram(part, edges)[0].tolist() for name, part in (("best", best), ("others", others))}
    return {"edges": edges.tolist(), **counts}


def _differences(scores: Sequence[Sequence[float]]) -> Any:
    return np.array([better - worse for row in scores for better, worse in combinations(row, 2)])


def _calibration_error(bins: Sequence[dict[str, float]]) -> float:
    total = sum(part["count"] for part in bins)
    return sum(part["count"] * abs(part["accuracy"] - part["confidence"]) for part in bins) / total
