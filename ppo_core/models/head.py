"""From hidden states to the logprob and the entropy of each token, without keeping what a vocabulary's logits cost.

    logprob = z_y - logsumexp(z)        entropy = logsumexp(z) - sum p z        z = hidden weight' / temperature
    d logprob / dz = onehot(y) - p      d entropy / dz = -p (log p + entropy)            p = softmax(z)

Plain autograd keeps the logits three to four times. Here they are kept once, in the product's own type, and become
their own gradient in place, counted in fp32 a block at a time; where they are many they are not kept at all: the
backward pass multiplies again, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ppo_core.models.divergence import Head, TokenDivergence, add_product, part_of, sizes_for
from ppo_core.models.loading import INSIDE_POLICY
from ppo_core.models.precision import factors, in_own_precision

NO_CHANCE = -1e4
"""In place of a logit of minus infinity less the highest: exp of it is 0 too, and 0 times it no NaN."""


class TokenLogprobs(torch.autograd.Function):
    """`[N, 2]` fp32 of hidden states `[N, H]`, `weight` `[V, H]` and targets `[N]`: logprob, entropy.

    `temperature` is one for all, or `[N, 1]`. The entropy is 0 unless `entropy` asks for it, and has a gradient only if
    that is "differentiable". `keep` the logits for the backward pass, if they are few enough.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        entropy: str | None,
        keep: bool,
    ) -> Tensor:
        hidden, weight = factors(hidden, weight)
        count, vocabulary = len(hidden), len(weight)
        sizes = sizes_for(hidden)
        keep = keep and count * vocabulary <= sizes.kept
        rows = count if keep else max(sizes.chunk // vocabulary, 1)
        output = torch.zeros((count, 2), dtype=torch.float32, device=hidden.device)
        total = torch.empty(count, dtype=torch.float32, device=hidden.device)
        logits = None
        for start in range(0, count, max(rows, 1)):
            part = slice(start, start + rows)
            logits = hidden[part] @ weight.t()
            _reduce(logits, part_of(temperature, part), targets[part], total[part], output[part], entropy)
        ctx.temperature, ctx.differentiable = temperature, entropy == "differentiable"
        ctx.save_for_backward(hidden, weight, targets, total, output)
        ctx.logits = logits if keep else None
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, total, output = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows = len(hidden) if ctx.logits is not None else max(sizes_for(hidden).chunk // len(weight), 1)
        for start in range(0, len(hidden), max(rows, 1)):
            part = slice(start, start + rows)
            temperature = part_of(ctx.temperature, part)
            back = hidden[part] @ weight.t() if ctx.logits is None else ctx.logits
            ctx.logits = None  # they become the gradient: a second backward pass would need them made again
            known = temperature, targets[part], total[part], output[part], gradient[part] / temperature
            _to_gradient(back, *known, differentiable=ctx.differentiable)
            if to_hidden is not None:
                to_hidden[part] = back @ weight
            if to_weight is not None:
                add_product(to_weight, back.t(), hidden[part])
        return to_hidden, to_weight, None, None, None, None


def _blocks(logits: Tensor, temperature: float | Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows after the other, and their logits over the temperature in fp32: themselves, where they are that."""
    count = max(sizes_for(logits).block // max(logits.shape[1], 1), 1)
    for start in range(0, len(logits), count):
        rows = slice(start, start + count)
        block, at = logits[rows].float(), part_of(temperature, rows)
        yield rows, block if isinstance(at, float) and at == 1 else block / at


def _reduce(
    logits: Tensor, temperature: float | Tensor, targets: Tensor, total: Tensor, output: Tensor, entropy: str | None
) -> None:
    """Fill `total` with the logsumexp and `output` with logprob and entropy."""
    if logits.is_cuda:
        from ppo_core.models.head_kernels import fill_statistics

        fill_statistics(logits, temperature, targets, total, output, entropy=entropy is not None)
        return
    for rows, block in _blocks(logits, temperature):
        if entropy is None:
            total[rows] = block.logsumexp(1)
        else:
            total[rows], output[rows, 1] = _with_entropy(block)
        output[rows, 0] = block.gather(1, targets[rows, None])[:, 0] - total[rows]


def _with_entropy(block: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the logsumexp, to the bit as torch has it, and the entropy `log s - sum x exp x / s`, s = sum exp x,
    where x is the row less its highest: one exponential of each number serves both."""
    highest = block.amax(1, keepdim=True)
    shifted = (block - highest).clamp_(min=NO_CHANCE)
    weights = shifted.exp()
    total = weights.sum(1)
    log_total = total.log()
    return log_total + highest[:, 0], log_total - weights.mul_(shifted).sum(1) / total


def _to_gradient(
    logits: Tensor,
    temperature: float | Tensor,
    targets: Tensor,
    total: Tensor,
    output: Tensor,
    gradient: Tensor,
    *,
    differentiable: bool,
) -> None:
    """Turn the logits into the gradient of what was made of them, in place; `gradient` is `[N, 2]`."""
    if logits.is_cuda:
        from ppo_core.models.head_kernels import turn_into_gradient

        turn_into_gradient(logits, temperature, targets, total, output, gradient, differentiable=differentiable)
        return
    for rows, block in _blocks(logits, temperature):
        to_logprob, to_entropy = gradient[rows].unbind(1)
        block.sub_(total[rows, None])  # log p
        if differentiable:
            factor = block.masked_fill(block == -torch.inf, 0.0).add_(output[rows, 1, None]).mul_(to_entropy[:, None])
            block.exp_().mul_(factor.add_(to_logprob[:, None]).neg_())
        else:
            block.exp_().mul_(-to_logprob[:, None])
        logits[rows] = block.scatter_add_(1, targets[rows, None], to_logprob[:, None])


@contextmanager
def token_logprobs_at(
    model: Any,
    index: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    entropy: str | None,
    reference: Head | None = None,
) -> Iterator[None]:
    """Inside, `model` gives `[1, N, 2]` where its logits would be: of its hidden states at `index`, see TokenLogprobs.

    With a `reference` it gives `[1, N, 3]`, the last of which is the KL to it.
    """

    def said(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden, keep = hidden.flatten(0, 1)[index], torch.is_grad_enabled()
        made: Tensor = TokenLogprobs.apply(hidden, weight, targets, temperature, entropy, keep)
        if reference is not None:
            kl = TokenDivergence.apply(hidden, weight, reference.hidden, reference.weight, temperature)
            made = torch.cat((made, kl[:, None]), 1)
        return made[None]

    with _head_gives(model, said):
        yield


@contextmanager
def head_at(model: Any, index: Tensor) -> Iterator[list[Head]]:
    """Inside, each pass of `model` adds to the list what its output embedding sees at `index`, and gives no logits."""
    found: list[Head] = []

    def said(hidden: Tensor, weight: Tensor) -> Tensor:
        found.append(Head(hidden.flatten(0, 1)[index], weight))
        return hidden[:, :0]

    with _head_gives(model, said):
        yield found


@contextmanager
def _head_gives(model: Any, said: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """The output embedding itself is called, and does something else: whatever DeepSpeed hung on it goes on working."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: said(hidden, head.weight)
    try:
        yield
    finally:
        del head.forward


@contextmanager
def values_beside(model: Any) -> Iterator[list[Tensor]]:
    """Inside, each pass of a policy with a value head adds the values `[rows, columns]` of all tokens to the list."""
    value_head = next(module for name, module in model.named_modules() if name.rpartition(".")[2] == INSIDE_POLICY)
    found: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, hidden: found.append(in_own_precision(value_head, hidden[0])[..., 0].float())
    )
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def logits_only_at(model: Any, index: Tensor) -> Iterator[None]:
    """Let the output embedding see only the hidden states at `index`: `[B, T, H]` becomes `[1, N, H]`.

    A hook on the output embedding works for every architecture, with whatever it does to its logits afterwards.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, hidden: (hidden[0].flatten(0, 1)[index][None],))
    try:
        yield
    finally:
        handle.remove()
