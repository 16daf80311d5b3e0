"""From ragged token sequences to `[B, R]`: the only module that knows the prompt offset, the shift by one and padding.

Sequences are padded on the right. A causal model never looks to the right, so no attention mask is needed, and no token
id is special: pad may equal EOS. The logits at sequence position p + t - 1 predict response token t of a prompt of p
tokens; the critic's output at the same position is the value of the state before that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from ppo_core.losses import entropy_from_logits
from ppo_core.records import TokenSequence


class Values(NamedTuple):
    """`values` `[B, R]`; `final` `[B]`: of the state after the last response token (for truncated responses)."""

    values: Tensor
    final: Tensor


class ResponseLayout(NamedTuple):
    """Where the response tokens of a batch are.

    >>> layout = response_layout([([5, 6], [7, 8, 2]), ([5], [9])])
    >>> layout.input_ids.tolist(), layout.response_mask.tolist()
    ([[5, 6, 7, 8, 2], [5, 9, 0, 0, 0]], [[True, True, True], [True, False, False]])
    >>> layout.positions.tolist(), layout.targets.tolist()
    ([1, 2, 3, 0], [7, 8, 2, 9])

    `input_ids` `[B, T]`; `response_mask` `[B, R]`; for each of the N response tokens, in row order: its `rows`, the
    `positions` of the logits that predict it, and the token itself in `targets`.
    """

    input_ids: Tensor
    response_mask: Tensor
    rows: Tensor
    positions: Tensor
    targets: Tensor

    def to_batch(self, flat: Tensor) -> Tensor:
        """Spread N per-token numbers over `[B, R]`, zeros elsewhere."""
        return torch.zeros(self.response_mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(
            self.response_mask, flat
        )


def response_layout(
    sequences: Sequence[TokenSequence | tuple[list[int], list[int]]], device: torch.device | str = "cpu"
) -> ResponseLayout:
    """Pad a ragged batch. Raises ValueError for an empty prompt: nothing would predict its first response token."""
    for index, (prompt, _) in enumerate(sequences):
        if not len(prompt):
            raise ValueError(f"sequence {index} has an empty prompt: its first response token has nothing to follow")
    total = max((len(p) + len(r) for p, r in sequences), default=0)
    width = max((len(r) for _, r in sequences), default=0)
    input_ids = torch.zeros((len(sequences), total), dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    rows: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for index, (prompt, response) in enumerate(sequences):
        input_ids[index, : len(prompt) + len(response)] = torch.tensor([*prompt, *response], dtype=torch.long)
        mask[index, : len(response)] = True
        rows += [index] * len(response)
        positions += range(len(prompt) - 1, len(prompt) + len(response) - 1)
        targets += response
    index_of = [torch.tensor(values, dtype=torch.long, device=device) for values in (rows, positions, targets)]
    return ResponseLayout(input_ids.to(device), mask.to(device), *index_of)


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
    layout = response_layout(sequences, device_of(model))
    with _logits_only_at(model, layout.rows, layout.positions):
        logits = model(input_ids=layout.input_ids, use_cache=False).logits[0]
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    chosen = logits.gather(1, layout.targets[:, None])[:, 0] - logits.logsumexp(1)
    logprobs = layout.to_batch(chosen)
    if not with_entropy:
        return logprobs
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_entropy):
        return logprobs, layout.to_batch(entropy_from_logits(logits))


def response_values(critic: Any, sequences: Sequence[Any]) -> Values:
    """The critic's values in fp32: `[B, R]` before each response token, and `[B]` after the last one."""
    layout = response_layout(sequences, device_of(critic))
    outputs = critic(layout.input_ids).float()
    last = [len(prompt) + len(response) - 1 for prompt, response in sequences]
    final = outputs[torch.arange(len(last), device=outputs.device), torch.tensor(last, device=outputs.device)]
    return Values(layout.to_batch(outputs[layout.rows, layout.positions]), final)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


@contextmanager
def _logits_only_at(model: Any, rows: Tensor, positions: Tensor) -> Iterator[None]:
    """Let the output embedding see only the given hidden states: `[B, T, H]` becomes `[1, N, H]`.

    A hook on the output embedding works for every architecture, with whatever it does to its logits afterwards.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, hidden: (hidden[0][rows, positions][None],))
    try:
        yield
    finally:
        handle.remove()
