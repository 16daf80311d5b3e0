"""Scores to what a response is worth: normalised, clipped, less what its ending and its length cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_core.records import ScoreRow
from ppo_core.rewards import ScoreMoments, clip_scores, missing_eos_penalty, overlong_penalty
from ppo_core.spec import AdvantageSpec


class Shaped(NamedTuple):
    """`scores` `[B]` in the scores' unit, and what was measured on the way."""

    scores: Tensor
    measured: dict[str, float]


def moments_with(carried: Mapping[str, float], scores: list[ScoreRow]) -> ScoreMoments:
    """The moments of the iterations before, which `carried` has by name, and of this one's scores."""
    return ScoreMoments(**carried).with_scores(torch.tensor([row.score for row in scores if row.score is not None]))


def shape_scores(
    scores: Tensor,
    finished: Tensor,
    lengths: Tensor,
    spec: AdvantageSpec,
    *,
    max_response_tokens: int,
    moments: ScoreMoments,
) -> Shaped:
    """What responses are worth before any price of divergence. All tensors are `[B]`, `lengths` in tokens."""
    measured = dict[str, float]()
    if spec.score_norm != "none":
        scores = (scores - (moments.mean if spec.score_norm == "mean_std" else 0.0)) / moments.std
        measured |= {"reward/score_mean": moments.mean, "reward/score_std": moments.std}
    if spec.score_clip is not None:
        scores = clip_scores(scores, limit=spec.score_clip)
    scores = missing_eos_penalty(scores, finished, penalty=spec.missing_eos_penalty)
    if spec.overlong is not None:
        buffer, factor = spec.overlong.buffer, spec.overlong.penalty
        charged = overlong_penalty(lengths, max_length=max_response_tokens, buffer=buffer, factor=factor)
        scores, measured["reward/overlong"] = scores - charged, float((charged > 0).float().mean())
    return Shaped(scores, measured)
