"""The loss of a reward model that learns from preferences.

Of K responses to a prompt, the best first, with scores r_1, ..., r_K (Ouyang et al. 2022, arXiv:2203.02155, equation 1;
K = 2 is the model of Bradley and Terry):

    loss = -1 / (K over 2) sum over i < j of log sigmoid(r_i - r_j)

With a margin m of the pair (Touvron et al. 2023, arXiv:2307.09288, equation 2), -log sigmoid(r_i - r_j - m). With label
smoothing e the preference is the other way round with probability e (Mitchell 2023, conservative DPO):

    (1 - e) (-log sigmoid(r_i - r_j - m)) + e (-log sigmoid(r_j - r_i - m))

Only differences are learned. Centring adds c (r_i + r_j)**2, so that scores lie around zero (Eisenstein et al. 2023,
arXiv:2312.09244, equation 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Pairs(NamedTuple):
    """Which of N scores are compared: `better[p]` with `worse[p]`, in row `row[p]`, each `[P]`.

    `weight[p]` is 1 over the number of pairs of the row.

    >>> better, worse, row, weight = pairs_of([3, 2])
    >>> better.tolist(), worse.tolist(), row.tolist()
    ([0, 0, 1, 3], [1, 2, 2, 4], [0, 0, 0, 1])
    """

    better: Tensor
    worse: Tensor
    row: Tensor
    weight: Tensor


def pairs_of(sizes: Sequence[int], device: torch.device | str = "cpu") -> Pairs:
    """All pairs within rows of `sizes` scores, one row after the other, the best first."""
    found, start = list[tuple[int, int, int]](), 0
    for row, size in enumerate(sizes):
        found += [(better, worse, row) for better, worse in combinations(range(start, start + size), 2)]
        start += size
    better, worse, of_row = torch.tensor(found, dtype=torch.long).reshape(-1, 3).unbind(1)
    weight = 1 / torch.bincount(of_row)[of_row].float()
    return Pairs(better.to(device), worse.to(device), of_row.to(device), weight.to(device))


def preference_loss(
    scores: Tensor, margins: Tensor, pairs: Pairs, *, label_smoothing: float = 0.0, centring: float = 0.0
) -> Tensor:
    """The sum over rows, each the mean over its pairs, of the loss above; a scalar.

    `scores` `[N]` in fp32, `margins` a number for each row.
    """
    better, worse, margin = scores[pairs.better], scores[pairs.worse], margins[pairs.row]
    loss = -(1 - label_smoothing) * logsigmoid(better - worse - margin)
    if label_smoothing:
        loss = loss - label_smoothing * logsigmoid(worse - better - margin)
    if centring:
        loss = loss + centring * (better + worse).square()
    return (pairs.weight * loss).sum()
