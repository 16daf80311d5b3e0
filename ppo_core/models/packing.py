"""Sequences of unequal length in one row: every token a real one, each attending to its own sequence alone.

Linear layers then see no padding. Attention runs on groups of sequences of similar length, padded within the group; on
GPUs in half precision on torch's kernel for variable lengths. Which models can do this is a list: their layers mix
tokens by plain causal attention alone, through the interface that transformers has for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ppo_core.models.precision import for_attention

IMPLEMENTATION = "ppoflow_packed"
MODEL_TYPES = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
NO_MASK = torch.empty((1, 1, 0, 0))
"""What a packed row has in place of a mask of all tokens by all tokens: transformers hands on what has four dimensions,
and need not wait for a GPU to tell it from the positions whether the row is packed."""
SHORTEST_OF_LONGEST = 0.75  # a group's shortest sequence has at least this part of its longest's tokens


@dataclass(frozen=True)
class Group:
    """Neighbours in the row, padded for attention: `count` sequences of at most `width` tokens, `tokens` together.

    `gather` `[count * width]` says which of the group's tokens goes to each place, `scatter` the place of each token,
    `padding` the places without one.
    """

    tokens: int
    count: int
    width: int
    gather: Tensor
    scatter: Tensor
    padding: Tensor


@dataclass(frozen=True)
class Packing:
    """Sequences of ascending `lengths`, one after the other: `ends` `[B + 1]` on their device, the first of them 0."""

    ends: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> Packing:
        """For sequences of ascending `lengths`."""
        return cls(to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device), tuple(lengths))

    @property
    def longest(self) -> int:
        """The last sequence's tokens."""
        return self.lengths[-1] if self.lengths else 0

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Made where they are asked for: torch's kernel for variable lengths needs none."""
        lengths, groups, first = self.lengths, list[Group](), 0
        for index, length in enumerate(lengths):
            following = lengths[index + 1] if index + 1 < len(lengths) else None
            if following is None or lengths[first] < SHORTEST_OF_LONGEST * following:
                groups.append(_group(lengths[first : index + 1], length, self.ends.device))
                first = index + 1
        return tuple(groups)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """There; a GPU copies it while this process goes on."""
    if tensor.is_cuda or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _group(lengths: Sequence[int], width: int, device: torch.device) -> Group:
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    gather = torch.zeros(real.shape, dtype=torch.long).masked_scatter(real, torch.arange(sum(lengths)))
    scatter, padding = (places.flatten().nonzero()[:, 0] for places in (real, ~real))
    indices = (to_device(index, device) for index in (gather.flatten(), scatter, padding))
    return Group(sum(lengths), len(lengths), width, *indices)


class _Rearrange(torch.autograd.Function):
    """`rows[index]`, where `inverse` says from which place each row's gradient comes; rows at `unused` get none.

    Plain indexing would add gradients up row by row; here the backward pass is one copy, as the forward pass is.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, unused: Tensor) -> Tensor:
        ctx.inverse, ctx.unused = inverse, unused
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.index_select(0, ctx.inverse).index_fill_(0, ctx.unused, 0.0), None, None, None


def enable_packing(model: Any) -> None:
    """Let a causal LM or a critic take packed rows from now on, where its architecture can."""
    if can_pack(model.config):
        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)
        for module in model.modules():
            if "config" in vars(module):  # layers may have copies of their own
                module.config._attn_implementation = IMPLEMENTATION
        model.takes_packed_rows = True


def packs(model: Any) -> bool:
    """Whether `enable_packing` prepared it; `model` may be what DeepSpeed runs it with."""
    return any(vars(module).get("takes_packed_rows", False) for module in (model, *model.children()))


def can_pack(config: Any) -> bool:
    """Whether models of this configuration take packed rows."""
    return config.model_type in MODEL_TYPES and _attends_to_all(config.to_dict())


def _attends_to_all(config: Mapping[str, Any]) -> bool:
    """Whether no layer looks through a window."""
    if kinds := config.get("layer_types"):
        return set(kinds) == {"full_attention"}
    return config.get("sliding_window") is None or not config.get("use_sliding_window", True)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, `[1, heads, tokens, size]` each, as transformers calls it.

    Without `packing` it is transformers' own, by scaled_dot_product_attention.
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    heads = query.shape[1]
    rows = [part[0].transpose(0, 1) for part in for_attention(query, key, value)]  # [tokens, heads, size]
    fast = query.is_cuda and rows[0].dtype != torch.float32 and not torch.are_deterministic_algorithms_enabled()
    if fast and has_kernel(query.shape[-1], torch.cuda.get_device_capability(query.device)):
        return _on_cuda(rows, packing, scaling)[None], None
    rows = [part if part.shape[1] == heads else part.repeat_interleave(heads // part.shape[1], 1) for part in rows]
    parts = zip(*(part.split([group.tokens for group in packing.groups]) for part in rows), strict=True)
    attended = [_in_group(part, group, scaling) for part, group in zip(parts, packing.groups, strict=True)]
    return torch.cat(attended)[None], None


def _in_group(rows: tuple[Tensor, ...], group: Group, scaling: float | None) -> Tensor:
    """`[tokens of the group, heads, size]`."""
    # Padding holds copies of a real token that no other attends to, for it comes after them: its gradient is zero.
    places = (_Rearrange.apply(part, group.gather, group.scatter, group.padding[:0]) for part in rows)
    query, key, value = (part.unflatten(0, (group.count, group.width)).transpose(1, 2) for part in places)
    with torch.autocast(query.device.type, enabled=False):
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    unpadded: Tensor = _Rearrange.apply(
        output.transpose(1, 2).flatten(0, 1), group.scatter, group.gather, group.padding
    )
    return unpadded


def has_kernel(size: int, capability: tuple[int, int]) -> bool:
    """Whether torch's kernel for variable lengths takes heads of that size on a GPU of that compute capability."""
    return size % 8 == 0 and size <= 256 and capability >= (8, 0)


def _on_cuda(rows: list[Tensor], packing: Packing, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = rows
    output: Any = varlen_attn(
        query,
        key,
        value,
        packing.ends,
        packing.ends,
        packing.longest,
        packing.longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    attended: Tensor = output
    return attended
