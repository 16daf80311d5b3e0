"""Weights for tokens that were sampled with other probabilities than the trainer computes for the same weights.

    w_t = pi_old(y_t) / mu(y_t)           pi_old: the trainer's probability, mu: the sampler's (`sampler_logprobs`)

    token       min(w_t, cap)
    sequence    min(prod_t w_t, cap), the same at each token of a response
    mask        w_t where floor <= w_t <= cap, and 0 elsewhere: the token is left out

Kernels and number formats of sampler and trainer differ, so mu is not quite pi_old; on the sampler's tokens w_t makes
the gradient that of pi_old, and the cap bounds its variance.

Source: truncation: Ionides 2008, Truncated Importance Sampling; for samplers beside trainers: Yao et al. 2025, Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training; mask: Ling Team 2025 (arXiv:2510.18855), IcePop.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ppo_core.losses import LARGEST_LOG_RATIO
from ppo_core.masking import check_mask, zero_masked

Correction = Literal["token", "sequence", "mask"]


class Importance(NamedTuple):
    """`weights` `[B, R]`, constants, 0 outside the mask; `cut` `[B, R]`: where the cap or the mask changed them."""

    weights: Tensor
    cut: Tensor


def importance(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    correction: Correction,
    *,
    cap: float,
    floor: float = 0.0,
) -> Importance:
    """The weights of a correction; logprobs in nats and the mask are `[B, R]`. `floor` is for `mask` alone.

    Raises ValueError for shapes that differ, an unknown correction, a cap below 1 or a floor above 1.

    >>> import torch
    >>> sampled = torch.tensor([[-1.0, -1.0, -1.0]])
    >>> trained = sampled + torch.tensor([[2.0, 0.5, 4.0]]).log()
    >>> found = importance(trained, sampled, torch.ones(1, 3, dtype=torch.bool), "token", cap=2.0)
    >>> found.weights.round(decimals=4).tolist()
    [[2.0, 0.5, 2.0]]
    """
    check_mask("response_mask", response_mask, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    if correction not in get_args(Correction):
        raise ValueError(f"correction={correction!r} is unknown: choose one of {', '.join(get_args(Correction))}")
    if not cap >= 1 or not 0 <= floor <= 1:
        raise ValueError(f"cap={cap} and floor={floor} must have 1 between them: equal probabilities weigh 1")
    trained, sampled = (zero_masked(x.detach(), response_mask) for x in (old_logprobs, sampler_logprobs))
    difference = trained - sampled
    if correction == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(difference)
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    cut = ratio > cap
    if correction == "mask":
        cut = cut | (ratio < floor)
        weights = ratio.masked_fill(cut, 0.0)
    else:
        weights = ratio.clamp(max=cap)
    return Importance(zero_masked(weights, response_mask), cut & response_mask)
