"""KL(policy, reference) of each token's whole distribution, without keeping what two vocabularies' logits cost.

    KL = sum_v p_v (log p_v - log q_v) = sum_v p_v (exp(d_v) - 1 - d_v)        d = log q - log p, p = softmax(z)
    dKL / dz_v = p_v (mean_p d - d_v)                                          z = hidden weight' / temperature

Both sums of KL are the same, for p and q sum to 1; in the second no term is negative, and what rounding does to a
logsumexp hardly matters: near 0 it keeps its digits. The backward pass multiplies again, a chunk at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_core.models.precision import factors

ALIGNED = 64
"""A GPU is several times as fast with a part of a matrix that begins at a multiple of so many numbers."""


class Sizes(NamedTuple):
    """How many logits are kept for the backward pass at most; multiplied at a time where they are not; worked on at a
    time, element by element, on a CPU; and of each of two models compared at a time. `product`: numbers at a time of a
    matrix product that is added to another type."""

    kept: int
    chunk: int
    block: int
    pair: int
    product: int


ON_CPU = Sizes(kept=2**26, chunk=2**23, block=2**19, pair=2**23, product=2**22)
"""A block, and one or two like it, stay in a core's cache: with 2**20 the same work takes up to eight times as long."""
ON_CUDA = Sizes(kept=2**29, chunk=2**29, block=2**27, pair=2**25, product=2**26)
"""At a vocabulary of 151,936 some 3,500 tokens are multiplied at a time, 1 GiB in bf16: the kernels outlast their
launches."""


def sizes_for(tensor: Tensor) -> Sizes:
    """Those of the device that it lies on."""
    return ON_CUDA if tensor.is_cuda else ON_CPU


class Head(NamedTuple):
    """What a model says at N tokens, without gradient: `hidden` states `[N, H]`, and its output `weight` `[V, H]`."""

    hidden: Tensor
    weight: Tensor


class TokenDivergence(torch.autograd.Function):
    """`[N]` fp32, in nats, of the policy's `hidden` `[N, H]` and `weight` `[V, H]` and the reference's.

    `temperature` is one for all, or `[N, 1]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        their_hidden: Tensor,
        their_weight: Tensor,
        temperature: float | Tensor,
    ) -> Tensor:
        hidden, weight, their_hidden, their_weight = factors(hidden, weight, their_hidden, their_weight)
        output = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in _parts(hidden, weight):
            at = part_of(temperature, part)
            log_p = _log_softmax(hidden[part], weight, at)
            output[part] = divergence(log_p, _log_softmax(their_hidden[part], their_weight, at))
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, their_hidden, their_weight)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, their_hidden, their_weight = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(hidden, weight):
            at = part_of(ctx.temperature, part)
            log_p = _log_softmax(hidden[part], weight, at)
            log_q, p = _log_softmax(their_hidden[part], their_weight, at), log_p.exp()
            d = torch.where(p > 0, log_q - log_p, 0.0)
            factor = gradient[part, None] / at
            back = (p * ((p * d).sum(1, keepdim=True) - d) * factor).to(weight.dtype)
            if to_hidden is not None:
                to_hidden[part] = back @ weight
            if to_weight is not None:
                add_product(to_weight, back.t(), hidden[part])
        return to_hidden, to_weight, None, None, None


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of distributions `[N, V]` given as logs: `[N]` in nats, differentiable in both.

    >>> half, third = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> divergence(half, half).tolist(), round(divergence(half, third).item(), 4)
    ([0.0], 0.1438)
    """
    p, q = log_p.exp(), log_q.exp()
    d = torch.where(p > 0, log_q - log_p, 0.0)
    near = d.abs() < 1
    terms = torch.where(near, p * (torch.expm1(torch.where(near, d, 0.0)) - d), q - p - p * d)
    return torch.where(p > 0, terms, q).sum(1)


def part_of(temperature: float | Tensor, part: slice) -> float | Tensor:
    """That of some tokens, of one for all or of `[N, 1]`."""
    return temperature[part] if isinstance(temperature, Tensor) else temperature


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of `left` and `right` to `total`; it is never a tensor of its own as a whole."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    rows = max(sizes_for(total).product // right.shape[1], 1)
    rows -= rows % ALIGNED if rows > ALIGNED else 0
    for part, factor in zip(total.split(rows), left.split(rows), strict=True):
        part += factor @ right


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float | Tensor) -> Tensor:
    return (hidden @ weight.t()).float().div_(temperature).log_softmax(1)


def _parts(hidden: Tensor, weight: Tensor) -> list[slice]:
    rows = max(sizes_for(hidden).pair // len(weight), 1)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]
