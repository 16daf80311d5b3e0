"""From one score per response and one divergence per token to the rewards that PPO learns from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_core.masking import check_mask, check_rows, zero_masked

SMALLEST_VARIANCE = 1e-8


@torch.no_grad()
def token_rewards(
    scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float, parts: Tensor | None = None
) -> Tensor:
    """Per-token rewards: -kl_coef * kl at every token that counts, plus the score at the last one of its row.

    Scores that came in `parts` are added where these stand; `scores` is then what is left for the last token.
    Shapes: scores [B], in the reward's own unit, as parts [B, R]; kl [B, R] in nats; response_mask [B, R] bool; result
    [B, R]. Outside the mask, in holes as well (tokens of a tool's answer), rewards are exactly 0; a row all False
    receives no score.
    Raises ValueError for a mask that is not bool and for shapes that do not fit.
    Source: Ouyang et al. 2022 (arXiv:2203.02155), equation 2, without its pretraining term.

    Two responses, the second with a hole and one slot of padding:

    >>> token_rewards(torch.tensor([1.0, 2.0]),
    ...               torch.tensor([[0.5, 0.5, 0.5, 0.5], [1.0, 9.0, 0.5, 9.0]]),
    ...               torch.tensor([[True, True, True, True], [True, False, True, False]]), kl_coef=0.5).tolist()
    [[-0.25, -0.25, -0.25, 0.75], [-0.5, 0.0, 1.75, 0.0]]
    """
    check_mask("response_mask", response_mask, kl=kl)
    check_rows("response_mask", response_mask, scores=scores)
    still_to_come = response_mask.flip(1).cumsum(1).flip(1)
    last = response_mask & (still_to_come == 1)
    credited = zero_masked(scores.unsqueeze(1).expand_as(response_mask), last)
    if parts is not None:
        check_mask("response_mask", response_mask, parts=parts)
        credited = credited + zero_masked(parts, response_mask)
    return credited - kl_coef * zero_masked(kl, response_mask)


def missing_eos_penalty(scores: Tensor, finished: Tensor, *, penalty: float) -> Tensor:
    """Scores [B], lowered by `penalty` (>= 0, in the scores' unit) where the response did not end by itself.

    Shapes: scores [B]; finished [B] bool, True where the policy stopped by its own stop token; result [B].
    Raises ValueError for a negative penalty, for a `finished` that is not bool, and for shapes that differ.

    >>> missing_eos_penalty(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), penalty=0.25).tolist()
    [1.0, 0.75]
    """
    check_mask("finished", finished, scores=scores)
    if not penalty >= 0:
        raise ValueError(f"penalty={penalty} must not be below 0: it is subtracted, so pass its size, {-penalty}")
    return torch.where(finished, scores, scores - penalty)


def clip_scores(scores: Tensor, *, limit: float) -> Tensor:
    """Scores, any shape, cut to [-limit, limit]. Raises ValueError for a limit that is not positive.

    >>> clip_scores(torch.tensor([-7.0, 0.5, 7.0]), limit=5.0).tolist()
    [-5.0, 0.5, 5.0]
    """
    if not limit > 0:
        raise ValueError(f"limit={limit} must be above 0: a limit of 0 would erase every score")
    return scores.clamp(-limit, limit)


class ScoreMoments(NamedTuple):
    """Of all scores so far: how many, their mean, and the sum of their squared deviations from it; in float64."""

    seen: float = 0.0
    mean: float = 0.0
    deviations: float = 0.0

    @property
    def std(self) -> float:
        """Their unbiased standard deviation; 1, which divides nothing, where it is below 1e-4 or there is one score."""
        variance = self.deviations / (self.seen - 1) if self.seen > 1 else 0.0
        return math.sqrt(variance) if variance >= SMALLEST_VARIANCE else 1.0

    def with_scores(self, scores: Tensor) -> ScoreMoments:
        """The moments of the scores so far and of `scores` `[N]`, as if all had been seen at once.

        Source: Chan, Golub and LeVeque 1983, Algorithms for Computing the Sample Variance, equations 2.1.

        >>> ScoreMoments().with_scores(torch.tensor([1.0, 2.0])).with_scores(torch.tensor([6.0]))
        ScoreMoments(seen=3.0, mean=3.0, deviations=14.0)
        """
        if not len(scores):
            return self
        new, count = scores.double(), self.seen + len(scores)
        mean = float(new.mean())
        distance, deviations = mean - self.mean, float((new - mean).square().sum())
        return ScoreMoments(
            count,
            self.mean + distance * len(new) / count,
            self.deviations + deviations + distance**2 * self.seen * len(new) / count,
        )


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """What to subtract from the score of a response that nears the length limit: between 0 and `factor`.

    Nothing up to max_length - buffer tokens, then linear, `factor` at max_length and, capped, beyond it.
    Shapes: lengths [B], in tokens; result [B], in the scores' unit, never negative (the source's R_length with its sign
    turned). Raises ValueError unless 0 < buffer <= max_length and factor >= 0.
    Source: Yu et al. 2025, DAPO (arXiv:2503.14476), equation 13, there with factor = 1.

    >>> overlong_penalty(torch.tensor([6, 8, 10, 12]), max_length=10, buffer=4, factor=2.0).tolist()
    [0.0, 1.0, 2.0, 2.0]
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must lie in 1..max_length={max_length}: the penalty grows within the buffer")
    if not factor >= 0:
        raise ValueError(f"factor={factor} must not be below 0: it is subtracted, so pass its size, {-factor}")
    excess = lengths - (max_length - buffer)
    return (excess / buffer).clamp(0, 1) * factor
