"""Scores to what a response is worth: normalised, clipped, less what its ending and its length cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_core.records import InputError, ScoreRow
from ppo_core.rewards import ScoreMoments, clip_scores, missing_eos_penalty, overlong_penalty
from ppo_core.spec import AdvantageSpec

LARGEST_WORTH = 1e15
"""Beyond it the sum of the squares of a batch may not fit into float32."""


class Shaped(NamedTuple):
    """`scores` `[B]`, what is credited at the last token, in the scores' unit; and what was measured on the way.

    `parts` `[B, R]`, where scores came in parts, are credited where they stand, and `scores` is what is left.
    """

    scores: Tensor
    measured: dict[str, float]
    parts: Tensor | None = None


def moments_with(carried: Mapping[str, float], scores: list[ScoreRow]) -> ScoreMoments:
    """The moments of the iterations before, which `carried` has by name, and of this one's scores."""
    return ScoreMoments(**carried).with_scores(torch.tensor([row.score for row in scores if row.score is not None]))


def parts_of(scores: list[ScoreRow], lengths: Tensor) -> Tensor | None:
    """`[B, R]`: scores where they are credited, those in one piece at the last token; None where all are in one.

    `lengths` `[B]` are those of the responses, in tokens.
    """
    if all(row.token_scores is None for row in scores):
        return None
    parts = torch.zeros(len(scores), int(lengths.max()))
    for index, (row, length) in enumerate(zip(scores, lengths.tolist(), strict=True)):
        given = {length - 1: row.score or 0.0} if row.token_scores is None else row.token_scores
        for token, score in given.items():
            parts[index, token] = score
    return parts


def shape_scores(
    rows: list[ScoreRow],
    finished: Tensor,
    lengths: Tensor,
    spec: AdvantageSpec,
    *,
    max_response_tokens: int,
    moments: ScoreMoments,
    counted: Tensor,
) -> Shaped:
    """What responses are worth before any price of divergence. Tensors are `[B]`, `lengths` in tokens; what was
    measured is of those that are `counted`.

    Raises InputError where a response is worth more than advantages can be made of.

    A response is worth the same with its score in parts and in one piece: score_norm divides, and score_clip scales,
    all of its parts alike; the running mean and penalties are subtracted at its last token.
    """
    scores = torch.tensor([row.score or 0.0 for row in rows], dtype=torch.float32)
    measured, unit = dict[str, float](), 1.0
    if spec.score_norm != "none":
        unit = moments.std
        scores = (scores - (moments.mean if spec.score_norm == "mean_std" else 0.0)) / unit
        measured |= {"reward/score_mean": moments.mean, "reward/score_std": moments.std}
    kept = torch.ones_like(scores)
    if spec.score_clip is not None:
        clipped = clip_scores(scores, limit=spec.score_clip)
        scores, kept = clipped, torch.where(clipped == scores, kept, clipped / scores)
    scores = missing_eos_penalty(scores, finished, penalty=spec.missing_eos_penalty)
    if spec.overlong is not None:
        buffer, factor = spec.overlong.buffer, spec.overlong.penalty
        charged = overlong_penalty(lengths, max_length=max_response_tokens, buffer=buffer, factor=factor)
        scores, paid = scores - charged, (charged > 0)[counted].float()
        measured["reward/overlong"] = float(paid.mean()) if len(paid) else 0.0
    if not bool((scores[counted].abs() <= LARGEST_WORTH).all()):
        raise InputError(
            f"a response is worth {float(scores[counted].abs().max()):g}, and advantages are made in float32, where a "
            f"number beyond {LARGEST_WORTH:g} makes all of them 0: set advantages.score_clip, or let the reward give "
            "smaller numbers"
        )
    parts = parts_of(rows, lengths)
    if parts is None:
        return Shaped(scores, measured)
    parts = parts / unit * kept[:, None]
    rest = scores.double() - parts.double().sum(dim=1)
    return Shaped(rest.float(), measured, parts)
