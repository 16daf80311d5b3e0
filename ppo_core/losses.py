"""The losses of PPO: scalars to minimise, independent of how a minibatch is cut.

Each loss is a sum over the True slots divided by `normalizer`, the number of tokens (or sequences) of the whole
minibatch over all its microbatches and ranks: the losses of the parts then add up to the loss of the whole. Without a
normalizer the divisor is the number of True slots at hand. Where no slot counts a loss is exactly 0 and can still be
differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_core.masking import check_mask, zero_masked

LARGEST_LOG_RATIO = 20.0


def policy_log_ratio(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """log(policy / old policy) per token [B, R], cut to ±20 so that its exponential is finite; 0 outside the mask."""
    check_mask("response_mask", response_mask, logprobs=logprobs, old_logprobs=old_logprobs)
    difference = zero_masked(logprobs, response_mask) - zero_masked(old_logprobs.detach(), response_mask)
    return difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """PPO's clipped surrogate as a scalar loss; its gradient flows into `logprobs` alone.

    With ratio = exp(logprobs - old_logprobs), per token: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).
    `dual_clip` = c > 1 bounds, where A < 0, the min from below by c * A: a token that has become far more likely cannot
    dominate. `importance_weights` (sampler mismatch, aggregation) multiply each token's term as constants.
    Shapes: logprobs, old_logprobs (nats), advantages, response_mask (bool), importance_weights [B, R]; result a scalar.
    `normalizer`: see the module. The log-ratio is cut to ±20, beyond which no gradient flows.
    Raises ValueError for a mask that is not bool, shapes that differ, a clip below 0, a dual_clip of at most 1, or a
    normalizer that is not positive though tokens count.
    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 7; two bounds: Yu et al. 2025, DAPO (arXiv:2503.14476),
    equation 8; dual clip: Ye et al. 2020 (arXiv:1912.09729), equation 4.

    Equal policies: every ratio is 1, so the loss is the negative mean advantage of the two tokens that count:

    >>> logprobs = torch.tensor([[-1.0, -2.0, 0.0]])
    >>> policy_loss(logprobs, logprobs, torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]),
    ...             clip_low=0.2, clip_high=0.2).item()
    -1.5
    """
    check_mask("response_mask", response_mask, advantages=advantages)
    ratio = policy_log_ratio(logprobs, old_logprobs, response_mask).exp()
    advantages = zero_masked(advantages.detach(), response_mask)
    objective = _clipped_objective(ratio, advantages, clip_low, clip_high, dual_clip)
    if importance_weights is not None:
        check_mask("response_mask", response_mask, importance_weights=importance_weights)
    return weighted_mean(-objective, response_mask, weights=importance_weights, normalizer=normalizer)


def penalised_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    coef: float,
    importance_weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """PPO's other surrogate, with a price on divergence and no clip; its gradient flows into `logprobs` alone.

    Per token: -ratio * A + coef * (ratio - 1 - log ratio). On tokens of the old policy the bracket's expectation is
    KL(old policy, policy), it is never negative, and its gradient is that of the KL: the tokens' distribution is fixed.
    Arguments, shapes and errors are those of `policy_loss`; `importance_weights` multiply both terms.
    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 8.

    >>> old = torch.tensor([[-1.0, -1.0]])
    >>> logprobs = old + torch.tensor([[2.0, 1.0]]).log()
    >>> loss = penalised_policy_loss(logprobs, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), coef=2.0)
    >>> round(loss.item(), 4)  # (-2 + 2 (2 - 1 - log 2) - 1) / 2
    -1.1931
    """
    check_mask("response_mask", response_mask, advantages=advantages)
    log_ratio = policy_log_ratio(logprobs, old_logprobs, response_mask)
    kl = torch.expm1(log_ratio) - log_ratio
    terms = coef * kl - log_ratio.exp() * zero_masked(advantages.detach(), response_mask)
    if importance_weights is not None:
        check_mask("response_mask", response_mask, importance_weights=importance_weights)
    return weighted_mean(terms, response_mask, weights=importance_weights, normalizer=normalizer)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float | None,
    weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """The critic's squared error as a scalar loss; its gradient flows into `values` alone.

    Per token 0.5 * max((V - R)**2, (clip(V, V_old - clip, V_old + clip) - R)**2); with `clip` None 0.5 * (V - R)**2.
    Shapes: values, old_values, returns, response_mask (bool) [B, R], all in the rewards' unit; result a scalar.
    `weights` [B, R] multiply each token's term as constants; `normalizer`: see the module. Raises ValueError for a mask
    that is not bool, shapes that differ, a clip below 0, or a normalizer that is not positive though tokens count.
    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 9; the clipping is that of the authors' released code
    (openai/baselines, ppo2).

    >>> value_loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]]),
    ...            torch.tensor([[True, True]]), clip=0.5).item()
    0.8125
    """
    check_mask("response_mask", response_mask, values=values, old_values=old_values, returns=returns)
    values, returns = zero_masked(values, response_mask), zero_masked(returns.detach(), response_mask)
    errors = (values - returns).square()
    if clip is not None:
        clipped = clipped_values(values, old_values, response_mask, clip=clip)
        errors = torch.maximum(errors, (clipped - returns).square())
    return weighted_mean(0.5 * errors, response_mask, weights=weights, normalizer=normalizer)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last dimension: logsumexp(logits) - sum(softmax(logits) * logits).

    Shapes: logits [..., V], already divided by the temperature; result [...]. No logarithm of a probability is taken,
    and the largest logit is subtracted first, so neither certainty nor a large offset costs digits. A logit of -inf (a
    token that cannot occur) contributes nothing. Half precision is computed and returned in float32.

    >>> entropy_from_logits(torch.tensor([[7.0, float("-inf")], [1e4, -1e4]])).tolist()
    [0.0, 0.0]
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    finite = shifted.masked_fill(shifted == -torch.inf, 0.0)
    return shifted.logsumexp(-1) - (shifted.softmax(-1) * finite).sum(-1)


def check_clips(clip_low: float, clip_high: float) -> None:
    """Raise ValueError for a clip of the ratio that is below 0."""
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not clip >= 0:
            raise ValueError(f"{name}={clip} must not be below 0: it is the distance of the bound from a ratio of 1")


def clipped_values(values: Tensor, old_values: Tensor, response_mask: Tensor, *, clip: float) -> Tensor:
    """`values` [B, R], moved no further than `clip` (>= 0) from `old_values`; 0 outside the mask."""
    if not clip >= 0:
        raise ValueError(f"clip={clip} must not be below 0: give a value's largest change, or None for no clipping")
    old_values = zero_masked(old_values.detach(), response_mask)
    return zero_masked(zero_masked(values, response_mask).clamp(old_values - clip, old_values + clip), response_mask)


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    check_clips(clip_low, clip_high)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return objective
    if not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1: take 3, the source's value, or None for no dual clip")
    return torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)


def weighted_mean(
    terms: Tensor, mask: Tensor, *, weights: Tensor | None = None, normalizer: float | Tensor | None = None
) -> Tensor:
    """Sum of `terms` over the True slots of `mask`, all `[B, R]`, over `normalizer` (see the module); a scalar.

    `weights` `[B, R]` multiply the terms as constants. Raises ValueError as the losses do.
    """
    check_mask("mask", mask, terms=terms)
    if weights is not None:
        check_mask("mask", mask, weights=weights)
        terms = terms * zero_masked(weights.detach(), mask)
    total = zero_masked(terms, mask).sum()
    if normalizer is None:
        return total / mask.sum().clamp(min=1)
    if normalizer > 0:
        return total / normalizer
    if mask.any():
        raise ValueError(
            f"normalizer={normalizer} must be above 0 where {int(mask.sum())} tokens count: "
            "pass the number of tokens (or sequences) of the whole minibatch"
        )
    return total
