"""On a GPU: the statistics of each row of logits, and the gradient made of them in place, in one kernel each (Triton).

The formulas are those of `ppo_core.models.head`. Logits are read once for the statistics, and read and written once
for the gradient, in whatever type they have; all sums are in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e30)
"""In place of minus infinity, which a difference with itself would make a NaN."""
BLOCK = 4096
WARPS = 8


def fill_statistics(
    logits: Tensor,
    temperature: float | Tensor,
    targets: Tensor,
    total: Tensor,
    output: Tensor,
    *,
    entropy: bool,
) -> None:
    """Fill `total` `[N]` with the logsumexp and `output` `[N, 2]` with logprob and, if asked for, entropy.

    `logits` `[N, V]`, each row without gaps; `temperature` is one for all, or `[N, 1]`.
    """
    if len(logits):
        numbers = _numbers(logits, temperature, targets, total, output)
        _statistics[(len(logits),)](*numbers, entropy=entropy, block=BLOCK, num_warps=WARPS)


def turn_into_gradient(
    logits: Tensor,
    temperature: float | Tensor,
    targets: Tensor,
    total: Tensor,
    output: Tensor,
    gradient: Tensor,
    *,
    differentiable: bool,
) -> None:
    """Turn the logits into the gradient of what was made of them, in place; `gradient` `[N, 2]` is over the
    temperature already."""
    if len(logits):
        grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
        numbers = _numbers(logits, temperature, targets, total, output)
        _gradient[grid](*numbers, gradient.contiguous(), entropy=differentiable, block=BLOCK, num_warps=WARPS)


def _numbers(logits: Tensor, temperature: float | Tensor, targets: Tensor, total: Tensor, output: Tensor) -> list[Any]:
    """The arguments that both kernels begin with: one temperature for all rows (`own` is 0), or one for each (1)."""
    assert logits.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (targets, total, output))
    if not isinstance(temperature, Tensor):
        temperature = torch.full((1,), temperature, dtype=torch.float32, device=logits.device)
    own = temperature.float().contiguous()
    return [logits, logits.stride(0), logits.shape[1], own, int(len(own) > 1), targets, total, output]


@triton.jit
def _statistics(
    logits: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.constexpr,
    temperature: tl.tensor,
    own: tl.constexpr,
    targets: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    entropy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row. Each of `block` lanes keeps its highest number so far, and sums relative to it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    divisor = tl.load(temperature + row * own)
    highest = tl.full((block,), LOWEST, tl.float32)
    weight = tl.zeros((block,), tl.float32)  # sum of exp(x - highest)
    moment = tl.zeros((block,), tl.float32)  # sum of (x - highest) exp(x - highest)
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32) / divisor
        x = tl.where(x < LOWEST, LOWEST, x)  # a NaN stays one
        above = tl.maximum(highest, x)
        shrink, new = tl.exp(highest - above), tl.exp(x - above)
        if entropy:
            moment = (moment + (highest - above) * weight) * shrink + (x - above) * new
        weight = weight * shrink + new
        highest = above
    top = tl.max(highest, 0)
    shrink = tl.exp(highest - top)
    of_all = tl.sum(weight * shrink, 0)
    log_of_all = tl.log(of_all)
    if entropy:
        mean = tl.sum((moment + (highest - top) * weight) * shrink, 0) / of_all
        tl.store(output + 2 * row + 1, log_of_all - mean)
    chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32) / divisor
    tl.store(total + row, top + log_of_all)
    tl.store(output + 2 * row, chosen - (top + log_of_all))


@triton.jit
def _gradient(
    logits: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.constexpr,
    temperature: tl.tensor,
    own: tl.constexpr,
    targets: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    gradient: tl.tensor,
    entropy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """`block` numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    here = logits + row * stride + at
    x = tl.load(here, mask=at < vocabulary, other=0.0).to(tl.float32) / tl.load(temperature + row * own)
    logprob = x - tl.load(total + row)
    to_logprob = tl.load(gradient + 2 * row)
    factor = to_logprob
    if entropy:
        finite = tl.where(logprob == -float("inf"), 0.0, logprob)
        factor = to_logprob + tl.load(gradient + 2 * row + 1) * (finite + tl.load(output + 2 * row + 1))
    of_target = tl.where(at == tl.load(targets + row), to_logprob, 0.0)
    made = of_target - tl.exp(logprob) * factor
    tl.store(here, made.to(logits.dtype.element_ty), mask=at < vocabulary)
