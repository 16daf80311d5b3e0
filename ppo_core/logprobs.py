"""What models say of ragged token sequences, as `[B, R]`: logprobs, entropies, values.

A model that `enable_packing` has prepared computes on real tokens alone, any other on padded rows (`models/layout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from ppo_core.losses import entropy_from_logits
from ppo_core.models.head import logits_only_at, token_logprobs_at
from ppo_core.models.layout import Layout, packed_layout, padded_layout
from ppo_core.models.packing import packs


class Values(NamedTuple):
    """`values` `[B, R]`; `final` `[B]`: of the state after the last response token (for truncated responses)."""

    values: Tensor
    final: Tensor


@overload
def response_logprobs(
    model: Any, sequences: Sequence[Any], *, temperature: float, with_entropy: Literal[False] = False
) -> Tensor: ...


@overload
def response_logprobs(
    model: Any,
    sequences: Sequence[Any],
    *,
    temperature: float,
    with_entropy: Literal[True],
    detach_entropy: bool = False,
) -> tuple[Tensor, Tensor]: ...


def response_logprobs(
    model: Any,
    sequences: Sequence[Any],
    *,
    temperature: float,
    with_entropy: bool = False,
    detach_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability in nats of each response token under softmax(logits / temperature), in fp32.

    `model`: a Hugging Face causal LM, or a DeepSpeed engine around one. `sequences`: B pairs of token ids, prompt
    and response.
    Returns `[B, R]`, zeros past each response's end; with `with_entropy` also the entropy `[B, R]` of each token's
    distribution, without gradients (and the several times V numbers per token that they need) if `detach_entropy`.
    Logits are computed at response positions only. Raises ValueError for temperature <= 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: greedy sampling has no logprobs to train on")
    layout = _layout_for(model, sequences)
    if packs(model):
        wanted = None if not with_entropy else "detached" if detach_entropy else "differentiable"
        with token_logprobs_at(model, layout.index, layout.targets, temperature, wanted):
            both = model(**layout.inputs, use_cache=False).logits[0]
        logprobs = layout.to_batch(both[:, 0])
        if not with_entropy:
            return logprobs
        return logprobs, layout.to_batch(both[:, 1].detach() if detach_entropy else both[:, 1])
    with logits_only_at(model, layout.index):
        logits = model(**layout.inputs, use_cache=False).logits[0]
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    chosen = logits.gather(1, layout.targets[:, None])[:, 0] - logits.logsumexp(1)
    logprobs = layout.to_batch(chosen)
    if not with_entropy:
        return logprobs
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_entropy):
        return logprobs, layout.to_batch(entropy_from_logits(logits))


def response_values(critic: Any, sequences: Sequence[Any]) -> Values:
    """The critic's values in fp32: `[B, R]` before each response token, and `[B]` after the last one."""
    return aligned_values(critic, sequences, critic(**_layout_for(critic, sequences).inputs).float())


def aligned_values(model: Any, sequences: Sequence[Any], outputs: Tensor) -> Values:
    """The same of values `[rows, columns]` that `model` gave of all tokens in a pass over the sequences."""
    layout = _layout_for(model, sequences)
    return Values(layout.to_batch(layout.at_responses(outputs)), outputs.flatten(0, 1)[layout.last])


def _layout_for(model: Any, sequences: Sequence[Any]) -> Layout:
    return (packed_layout if packs(model) else padded_layout)(sequences, device_of(model))


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device
