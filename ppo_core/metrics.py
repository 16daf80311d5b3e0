"""Measurements of an update that add up: over microbatches, ranks and iterations alike.

A metric carries what it needs to be reduced exactly, a mean its total and count, so that no reader ever averages
averages or guesses from a name how to reduce. Add parts with `+`, or with `sum(parts, Mean())`; read the number from
`.value`. Until then what was measured on a GPU stays there: a number would have to be waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.losses import check_clips, clipped_values, policy_log_ratio
from ppo_core.masking import check_mask, masked_var, zero_masked

ROUNDING = 1e-5
"""Deviations that small a part of the largest number may be float32's rounding, in returns made of other numbers."""


@dataclass(frozen=True)
class Mean:
    """A mean that knows its weight: the total over `count` slots. Without arguments the neutral element of `+`.

    >>> (Mean(total=3.0, count=1) + Mean(total=1.0, count=3)).value
    1.0
    """

    total: float | Tensor = 0.0
    count: float | Tensor = 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """total / count; 0.0 where nothing was counted (the count tells the two apart)."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0

    @classmethod
    @torch.no_grad()
    def over(cls, x: Tensor, mask: Tensor) -> Mean:
        """Mean of `x` over the True slots of `mask`, both of one shape (else ValueError), summed in float64.

        >>> Mean.over(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])).value
        1.5
        """
        check_mask("mask", mask, x=x)
        return cls(zero_masked(x.double(), mask).sum(), mask.sum().double())


@dataclass(frozen=True)
class Maximum:
    """A maximum that can be continued. Without arguments the neutral element of `+`; nan, once seen, stays.

    >>> (Maximum(2.0) + Maximum(3.0) + Maximum()).value
    3.0
    """

    largest: float | Tensor = -math.inf

    def __add__(self, other: Maximum) -> Maximum:
        one, two = self.largest, other.largest
        if not isinstance(one, Tensor):
            one, two = (torch.tensor(one, dtype=torch.float64), two) if not isinstance(two, Tensor) else (two, one)
        return Maximum(torch.maximum(one, two) if isinstance(two, Tensor) else one.clamp(min=two))

    @property
    def value(self) -> float:
        """The largest number seen; 0.0 where none was."""
        largest = float(self.largest)
        return 0.0 if largest == -math.inf else largest

    @classmethod
    @torch.no_grad()
    def over(cls, x: Tensor, mask: Tensor) -> Maximum:
        """Maximum of `x` over the True slots of `mask`, both of one shape (else ValueError).

        >>> Maximum.over(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])).value
        2.0
        """
        check_mask("mask", mask, x=x)
        return cls(torch.where(mask, x, -math.inf).max()) if mask.numel() else cls()


@torch.no_grad()
def clip_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Mean:
    """Fraction of tokens whose clip binds, that is, which PPO's loss gives no gradient.

    These are ratio > 1 + clip_high with a positive advantage, and ratio < 1 - clip_low with a negative one, or ratio >
    dual_clip.
    Shapes: all tensors [B, R], response_mask bool. Raises ValueError for shapes, masks or clips as `policy_loss` does.
    Source: Schulman et al. 2017 (arXiv:1707.06347), figure 1; dual_clip: Ye et al. 2020 (arXiv:1912.09729), equation 5.

    >>> clip_fraction(torch.tensor([[0.0, 0.0]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([[1.0, -1.0]]),
    ...               torch.tensor([[True, True]]), clip_low=0.2, clip_high=0.2).value
    0.5
    """
    check_mask("response_mask", response_mask, advantages=advantages)
    check_clips(clip_low, clip_high)
    ratio = policy_log_ratio(logprobs, old_logprobs, response_mask).exp()
    above, below = ratio > 1 + clip_high, ratio < 1 - clip_low
    if dual_clip is not None:
        below = below | (ratio > dual_clip)
    return Mean.over((above & (advantages > 0)) | (below & (advantages < 0)), response_mask)


@torch.no_grad()
def value_clip_fraction(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip: float
) -> Mean:
    """Fraction of tokens whose value clip binds: the clipped error is the larger one, and the critic gets no gradient.

    Shapes: all tensors [B, R], response_mask bool. Raises ValueError for shapes, masks or a clip as `value_loss` does.

    >>> value_clip_fraction(torch.tensor([[3.0, 3.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([[4.0, 2.0]]),
    ...                     torch.tensor([[True, True]]), clip=0.5).value
    0.5
    """
    check_mask("response_mask", response_mask, values=values, old_values=old_values, returns=returns)
    clipped = clipped_values(values, old_values, response_mask, clip=clip)
    return Mean.over((clipped - returns).abs() > (values - returns).abs(), response_mask)


@torch.no_grad()
def approximate_kl(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Mean:
    """KL(old policy, policy) in nats per token: the k3 estimate ratio - 1 - log ratio, never negative.

    Shapes: all [B, R], response_mask bool. The log-ratio is cut to ±20, as in the loss, so the result is finite.
    Raises ValueError for a mask that is not bool and shapes that differ.
    Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.

    >>> round(approximate_kl(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[True]])).value, 4)
    0.7183
    """
    log_ratio = policy_log_ratio(logprobs, old_logprobs, response_mask)
    return Mean.over(torch.expm1(log_ratio) - log_ratio, response_mask)


@torch.no_grad()
def ratio_maximum(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Maximum:
    """Maximum of policy / old policy over the tokens that count.

    Shapes: all [B, R], response_mask bool. The log-ratio is cut to ±20, as in the loss.
    Raises ValueError for a mask that is not bool and shapes that differ.

    >>> ratio_maximum(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]])).value
    1.0
    """
    return Maximum.over(policy_log_ratio(logprobs, old_logprobs, response_mask).exp(), response_mask)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """How much of the returns' variance the critic explains: 1 - var(returns - values) / var(returns).

    1 is a perfect critic (up to a constant), 0 one that says nothing, negative one that misleads. Where the returns do
    not vary (all equal but for float32's rounding, one slot, none) there is nothing to explain, and the result is 0.0
    rather than nan. It does not add up over parts: give it a whole batch. Shapes: all alike, [B, R], mask bool. Raises
    ValueError where they differ.

    >>> explained_variance(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]]), torch.tensor([[True, True]]))
    0.75
    """
    check_mask("mask", mask, values=values, returns=returns)
    targets = returns.double()
    variance = masked_var(targets, mask).item()
    largest = max(float(zero_masked(numbers, mask).abs().max()) for numbers in (targets, values)) if mask.any() else 0.0
    if variance <= (ROUNDING * largest) ** 2:
        return 0.0
    return 1 - masked_var(targets - values.double(), mask).item() / variance
