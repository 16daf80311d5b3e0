"""Layers that keep less for their backward pass, and give the same bits.

Of a gated MLP, `down(silu(gate) * up)`, autograd keeps gate, up, the activation and the product; of a norm, its input
and the scaled input. Here it keeps gate and up alone, and the input: the rest is made again, by the operations that
made it first. That takes a pass or two over those tensors and no matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

MODEL_TYPES = frozenset({"llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"})
WEIGHED_IN_FLOAT32 = frozenset({"olmo2"})
"""Whose norms multiply by their weight before they round; the others round first."""
SILU = ("silu", "swish")
MLP = {"gate_proj", "up_proj", "down_proj"}
NORM = "variance_epsilon"


def keep_less(model: Any) -> None:
    """Have the model's layers keep less from now on, where its architecture is one whose layers are known."""
    if model.config.model_type not in MODEL_TYPES:
        return
    gated = model.config.hidden_act in SILU
    norm = _norm_in_float32 if model.config.model_type in WEIGHED_IN_FLOAT32 else _norm
    for module in model.modules():
        # Not closures: a copy of the module must get a copy of its own `forward`.
        if gated and dict(module.named_children()).keys() >= MLP:
            module.forward = MethodType(_mlp, module)
        if NORM in vars(module):
            module.forward = MethodType(norm, module)


def _mlp(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    product = _Gated.apply(gate, up)
    with _made_again(product, _gated, gate, up):
        found: Tensor = module.down_proj(product)
        return found


def _norm(module: Any, hidden: Tensor) -> Tensor:
    exact, rate, scaled = _scaled(module, hidden)
    with _made_again(scaled, torch.mul, exact, rate):
        found: Tensor = module.weight * scaled.to(hidden.dtype)
        return found


def _norm_in_float32(module: Any, hidden: Tensor) -> Tensor:
    exact, rate, scaled = _scaled(module, hidden)
    with _made_again(scaled, torch.mul, exact, rate):
        found: Tensor = (module.weight * scaled).to(hidden.dtype)
        return found


def _scaled(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The input in float32, what it is multiplied with, and the product."""
    exact = hidden.float()
    rate = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return exact, rate, exact * rate


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


class _Gated(torch.autograd.Function):
    """`silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = gradient * silu(gate)
        return torch.ops.aten.silu_backward(gradient * up, gate), of_up


class _Recipe(NamedTuple):
    """What is kept in place of a tensor."""

    make: Callable[..., Tensor]
    parts: tuple[Tensor, ...]
    shape: torch.Size


def _made_again(tensor: Tensor, make: Callable[..., Tensor], *parts: Tensor) -> saved_tensors_hooks:
    """Inside, autograd keeps `parts` where it would keep `tensor`, which is `make(*parts)`."""
    # torch keeps `kept` as long as the tensor, and all that it refers to.
    address, parts = tensor.data_ptr(), tuple(part.detach() for part in parts)

    def kept(saved: Tensor) -> Tensor | _Recipe:
        same = saved.data_ptr() == address and saved.dtype == parts[0].dtype and saved.is_contiguous()
        return _Recipe(make, parts, saved.shape) if same and saved.numel() else saved

    return saved_tensors_hooks(kept, _unpacked)


def _unpacked(kept: Tensor | _Recipe) -> Tensor:
    return kept.make(*kept.parts).view(kept.shape) if isinstance(kept, _Recipe) else kept
