"""Generalised advantage estimation over response tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_core.masking import check_mask, check_rows, zero_masked


class Advantages(NamedTuple):
    """What GAE yields, both [B, R] and 0 where the mask is False: unwhitened advantages, and the critic's targets."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap_values: Tensor | None = None,
) -> Advantages:
    """Advantages and returns of every response token, as if the masked slots were not there.

    Backwards over the tokens that count:
        delta_t = reward_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lambda * A_next
        return_t = A_t + V_t
    `next` is the next token that counts: value and advantage are carried across gaps (tokens of a tool's answer), so a
    gap costs no discount. After the last token V_next is `bootstrap_values` [B], the critic's value of what would have
    followed a truncated answer, or 0 where None (the answer ended there), and A_next is 0.
    `gae_lambda` is one number, or one for each response [B].
    Shapes: rewards, values, response_mask (bool) and both results [B, R], in the scores' unit. Rows all False give 0.
    Raises ValueError for a mask that is not bool, shapes that do not fit, and gamma or gae_lambda outside [0, 1].
    Source: Schulman et al. 2016 (arXiv:1506.02438), equations 11, 12 and 16.

    A response with a gap of one slot and one slot of padding; whatever stands there has no influence:

    >>> result = gae(torch.tensor([[0.0, 7.0, 1.0, 7.0]]), torch.tensor([[0.25, 7.0, 0.5, 7.0]]),
    ...              torch.tensor([[True, False, True, False]]), gamma=1.0, gae_lambda=0.5)
    >>> result.advantages.tolist(), result.returns.tolist()
    ([[0.5, 0.0, 0.5, 0.0]], [[0.75, 0.0, 1.0, 0.0]])
    """
    check_mask("response_mask", response_mask, rewards=rewards, values=values)
    check_rows("response_mask", response_mask)
    if isinstance(gae_lambda, Tensor):
        check_rows("response_mask", response_mask, gae_lambda=gae_lambda)
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not torch.all((torch.as_tensor(factor) >= 0) & (torch.as_tensor(factor) <= 1)):
            raise ValueError(f"{name}={factor} lies outside [0, 1]: it is a discount per token, 1 discounts nothing")
    if bootstrap_values is None:
        bootstrap_values = torch.zeros(len(response_mask), device=response_mask.device)
    check_rows("response_mask", response_mask, bootstrap_values=bootstrap_values)
    rewards, values = zero_masked(rewards, response_mask), zero_masked(values, response_mask)
    advantages = _recursion(rewards, values, response_mask, bootstrap_values, gamma, gamma * gae_lambda)
    return Advantages(advantages, advantages + values)


def length_adaptive_lambda(response_mask: Tensor, *, alpha: float) -> Tensor:
    """Of each response `[B]` a lambda by its number of tokens that count: 1 - 1 / (alpha * tokens), at least 0.

    The sum of lambda's powers is then alpha times the length: of long responses and short ones the same share of the
    tokens has a say. Below 1 / alpha tokens it would be negative, and is 0.
    Raises ValueError for a mask that is not [B, R], and an alpha that is not positive.
    Source: Yue et al. 2025, VAPO (arXiv:2504.05118), section 4.2, there with alpha = 0.05.

    >>> length_adaptive_lambda(torch.ones(1, 40, dtype=torch.bool), alpha=0.05).tolist()
    [0.5]
    """
    check_rows("response_mask", response_mask)
    if not alpha > 0:
        raise ValueError(f"alpha={alpha} must be above 0: take 0.05, the source's value")
    return (1 - 1 / (alpha * response_mask.sum(1).clamp(min=1))).clamp(min=0.0)


def _recursion(
    rewards: Tensor, values: Tensor, mask: Tensor, next_value: Tensor, gamma: float, decay: float | Tensor
) -> Tensor:
    advantages = torch.zeros_like(rewards + values)
    advantage = torch.zeros_like(next_value)
    for t in reversed(range(mask.shape[1])):
        counts = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(counts, delta + decay * advantage, advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = advantage
    return zero_masked(advantages, mask)
