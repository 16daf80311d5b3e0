"""What models say of ragged token sequences, as `[B, R]`: logprobs, entropies, values.

A model that `enable_packing` has prepared computes on real tokens alone, any other on padded rows (`models/layout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from ppo_core.losses import entropy_from_logits
from ppo_core.models.divergence import Head, divergence
from ppo_core.models.head import head_at, logits_only_at, token_logprobs_at
from ppo_core.models.layout import Layout, packed_layout, padded_layout
from ppo_core.models.packing import packs, to_device

Temperature = float | Tensor
"""One for all, or `[B]`: one for each sequence."""
Wanted = Literal["detached", "differentiable"] | None


class Statistics(NamedTuple):
    """`logprobs` in nats, `entropy` and `kl` to a reference, `[B, R]` each; None where it was not asked for."""

    logprobs: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None


class Values(NamedTuple):
    """`values` `[B, R]`; `final` `[B]`: of the state after the last response token (for truncated responses)."""

    values: Tensor
    final: Tensor


class LaidOut:
    """B pairs of token ids, prompt and response, as models compute on them: laid out once for all models that do it in
    one way."""

    def __init__(self, sequences: Sequence[Any]) -> None:
        self.sequences = sequences
        self._layouts: dict[tuple[bool, torch.device], Layout] = {}

    def layout_for(self, model: Any) -> Layout:
        """For this model, on its device."""
        key = packed, device = packs(model), device_of(model)
        if key not in self._layouts:
            self._layouts[key] = (packed_layout if packed else padded_layout)(self.sequences, device)
        return self._layouts[key]


@overload
def response_logprobs(
    model: Any, sequences: Sequence[Any] | LaidOut, *, temperature: float, with_entropy: Literal[False] = False
) -> Tensor: ...


@overload
def response_logprobs(
    model: Any,
    sequences: Sequence[Any] | LaidOut,
    *,
    temperature: Temperature,
    with_entropy: Literal[True],
    detach_entropy: bool = False,
) -> tuple[Tensor, Tensor]: ...


def response_logprobs(
    model: Any,
    sequences: Sequence[Any] | LaidOut,
    *,
    temperature: Temperature,
    with_entropy: bool = False,
    detach_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability in nats of each response token under softmax(logits / temperature), in fp32.

    `model`: a Hugging Face causal LM, or a DeepSpeed engine around one. `sequences`: B pairs of token ids, prompt
    and response. `temperature`: one for all, or `[B]`.
    Returns `[B, R]`, zeros past each response's end; with `with_entropy` also the entropy `[B, R]` of each token's
    distribution, without gradients (and the several times V numbers per token that they need) if `detach_entropy`.
    Logits are computed at response positions only. Raises ValueError for temperature <= 0.
    """
    wanted: Wanted = None if not with_entropy else "detached" if detach_entropy else "differentiable"
    said = response_statistics(model, sequences, temperature=temperature, entropy=wanted)
    if said.entropy is None:
        return said.logprobs
    return said.logprobs, said.entropy


def response_statistics(
    model: Any,
    sequences: Sequence[Any] | LaidOut,
    *,
    temperature: Temperature,
    entropy: Wanted = None,
    reference: Head | Tensor | None = None,
) -> Statistics:
    """The same in one pass; with what `reference_head` gave also KL(model, reference), with its exact gradient."""
    if not (torch.all(temperature > 0) if isinstance(temperature, Tensor) else temperature > 0):
        raise ValueError(f"temperature={temperature} must be above 0: greedy sampling has no logprobs to train on")
    layout = _layout_for(model, sequences)
    if isinstance(temperature, Tensor):
        temperature = to_device(temperature, layout.places.device)[layout.row_of_each, None]
    if packs(model):
        assert not isinstance(reference, Tensor)
        with token_logprobs_at(model, layout.index, layout.targets, temperature, entropy, reference):
            columns = model(**layout.inputs, use_cache=False).logits[0]
        if entropy is None:
            spread = None
        else:
            spread = layout.to_batch(columns[:, 1].detach() if entropy == "detached" else columns[:, 1])
        kl = None if reference is None else layout.to_batch(columns[:, 2])
        return Statistics(layout.to_batch(columns[:, 0]), spread, kl)
    with logits_only_at(model, layout.index):
        logits = model(**layout.inputs, use_cache=False).logits[0]
    logits = logits.float() / temperature
    chosen = logits.gather(1, layout.targets[:, None])[:, 0] - logits.logsumexp(1)
    kl = spread = None
    if reference is not None:
        assert isinstance(reference, Tensor)
        kl = layout.to_batch(divergence(logits.log_softmax(1), (reference.float() / temperature).log_softmax(1)))
    if entropy is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "differentiable"):
            spread = layout.to_batch(entropy_from_logits(logits))
    return Statistics(layout.to_batch(chosen), spread, kl)


@torch.no_grad()
def reference_head(model: Any, sequences: Sequence[Any] | LaidOut) -> Head | Tensor:
    """What `response_statistics` compares a model of the same architecture with, of the same sequences.

    Hidden states where the model packs, else all logits `[N, V]`.
    """
    layout = _layout_for(model, sequences)
    if packs(model):
        with head_at(model, layout.index) as found:
            model(**layout.inputs, use_cache=False)
        return found[0]
    with logits_only_at(model, layout.index):
        logits: Tensor = model(**layout.inputs, use_cache=False).logits[0]
    return logits


def response_values(critic: Any, sequences: Sequence[Any] | LaidOut) -> Values:
    """The critic's values in fp32: `[B, R]` before each response token, and `[B]` after the last one."""
    return aligned_values(critic, sequences, critic(**_layout_for(critic, sequences).inputs).float())


def aligned_values(model: Any, sequences: Sequence[Any] | LaidOut, outputs: Tensor) -> Values:
    """The same of values `[rows, columns]` that `model` gave of all tokens in a pass over the sequences."""
    layout = _layout_for(model, sequences)
    return Values(layout.to_batch(layout.at_responses(outputs)), outputs.flatten(0, 1)[layout.last])


def _layout_for(model: Any, sequences: Sequence[Any] | LaidOut) -> Layout:
    return (sequences if isinstance(sequences, LaidOut) else LaidOut(sequences)).layout_for(model)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device
