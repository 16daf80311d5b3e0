"""Scores to what a response is worth: clipped, less what its ending and its length cost."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ppo_core.rewards import clip_scores, missing_eos_penalty, overlong_penalty
from ppo_core.spec import AdvantageSpec


class Shaped(NamedTuple):
    """`scores` `[B]` in the scores' unit, and what was measured on the way."""

    scores: Tensor
    measured: dict[str, float]


def shape_scores(
    scores: Tensor, finished: Tensor, lengths: Tensor, spec: AdvantageSpec, *, max_response_tokens: int
) -> Shaped:
    """What responses are worth before any price of divergence. All tensors are `[B]`, `lengths` in tokens."""
    measured = dict[str, float]()
    if spec.score_clip is not None:
        scores = clip_scores(scores, limit=spec.score_clip)
    scores = missing_eos_penalty(scores, finished, penalty=spec.missing_eos_penalty)
    if spec.overlong is not None:
        buffer, factor = spec.overlong.buffer, spec.overlong.penalty
        charged = overlong_penalty(lengths, max_length=max_response_tokens, buffer=buffer, factor=factor)
        scores, measured["reward/overlong"] = scores - charged, float((charged > 0).float().mean())
    return Shaped(scores, measured)
