"""From terms per token to one number: a mean over tokens or over responses, whatever the cut into microbatches.

    token_mean                  sum_{i, t} x_it / sum_i T_i
    sequence_mean_token_sum     sum_i (sum_t x_it) / B
    sequence_mean_token_mean    sum_i (sum_t x_it / T_i) / B
    fixed_length                sum_i (sum_t x_it) / (B L)

over the B responses i with T_i > 0 tokens that count; L is the longest that a response may be. The numbers T_i and B
are always those of the whole minibatch, so the parts that microbatches and ranks compute add up.

Source: the three are compared by Yu et al. 2025, DAPO (arXiv:2503.14476), section 3.3 (token_mean), against Shao et al.
2024, GRPO (arXiv:2402.03300), equation 3 (sequence_mean_token_mean); fixed_length: Liu et al. 2025, Dr. GRPO
(arXiv:2503.20783), section 3.2.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from ppo_core.masking import check_rows

Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed_length"]


def token_weights(response_mask: Tensor, aggregation: Aggregation) -> Tensor:
    """What each token's term is multiplied by before it is summed, `[B, R]` fp32, 0 where the mask is False.

    >>> import torch
    >>> token_weights(torch.tensor([[True, True], [True, False]]), "sequence_mean_token_mean").tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    check_rows("response_mask", response_mask)
    _check(aggregation)
    weights = response_mask.float()
    if aggregation == "sequence_mean_token_mean":
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return weights


def divisor(response_mask: Tensor, aggregation: Aggregation, *, length: int | None = None) -> int:
    """What the weighted sum over a whole minibatch is divided by: its tokens, or its responses, that count.

    With fixed_length it is its responses times `length`, in tokens; else that is ignored.

    >>> import torch
    >>> mask = torch.tensor([[True, True], [False, False]])
    >>> divisor(mask, "token_mean"), divisor(mask, "sequence_mean_token_sum")
    (2, 1)
    """
    check_rows("response_mask", response_mask)
    _check(aggregation)
    if aggregation == "token_mean":
        return int(response_mask.sum())
    responses = int(response_mask.any(1).sum())
    if aggregation != "fixed_length":
        return responses
    if length is None:
        raise ValueError("aggregation='fixed_length' needs the length: pass what responses are cut at")
    return responses * length


def _check(aggregation: str) -> None:
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation={aggregation!r} is unknown: choose one of {', '.join(get_args(Aggregation))}")
