"""Layers that keep less for their backward pass, and on a CPU give the same bits.

Of a gated MLP, `down(silu(gate) * up)`, autograd keeps gate, up, the activation and the product; of a norm, its input
and the scaled input. Here it keeps gate and up alone, and the input: the rest is made again, by the operations that
made it first. That takes a pass or two over those tensors and no matrix product.

On a GPU each of these is one kernel, Liger's, where that package is installed: torch's operations read and write
memory for longer than the matrix products take. Those round as transformers does, but not to the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from ppo_core.spec import TrainingSpec

MODEL_TYPES = frozenset({"llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"})
WEIGHED_IN_FLOAT32 = frozenset({"olmo2"})
"""Whose norms multiply by their weight before they round; the others round first."""
SILU = ("silu", "swish")
MLP = {"gate_proj", "up_proj", "down_proj"}
NORM = "variance_epsilon"
ROTATION = "apply_rotary_pos_emb"


def may_keep_less(training: TrainingSpec) -> bool:
    """Whether `keep_less` may be called for a network: not where its layers are recomputed, nor with ZeRO 3, whose
    hooks would hold the weights that are gathered for one pass until the backward pass."""
    return not training.activation_checkpointing and training.zero_stage < 3


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


def rotate_in_one(model: Any) -> None:
    """Have the model's layers rotate queries and keys by one kernel where they are on a GPU.

    They look the function up in transformers' module of their architecture, so it is replaced there, for all models of
    that kind in this process. Code that comes with a model is left as it is.
    """
    if model.config.model_type not in MODEL_TYPES:
        return
    for name in {type(module).__module__ for module in model.modules()}:
        plain = vars(sys.modules[name]).get(ROTATION) if name.startswith("transformers.models.") else None
        if plain is not None and not isinstance(plain, partial):
            vars(sys.modules[name])[ROTATION] = partial(_rotated, plain)


class _Kernels(NamedTuple):
    """`silu(gate) * up`, with and without a backward pass, which writes into the two; the norm; and the rotation of
    queries and keys by their positions, which writes into them."""

    gated: Callable[[Tensor, Tensor], Tensor]
    gated_again: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[..., Tensor]
    rotate: Callable[..., tuple[Tensor, Tensor]]


@cache
def _kernels() -> _Kernels | None:
    """Those of the package liger_kernel, where it is."""
    try:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
        from liger_kernel.ops.swiglu import swiglu_forward
    except ImportError:
        return None
    return _Kernels(
        LigerSiLUMulFunction.apply,
        lambda gate, up: swiglu_forward(gate, up)[2],
        LigerRMSNormFunction.apply,
        LigerRopeFunction.apply,
    )


def _mlp(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    kernels = _kernels() if hidden.is_cuda else None
    gated, again = (_Gated.apply, _gated) if kernels is None else (kernels.gated, kernels.gated_again)
    product = gated(gate, up)
    with _made_again(product, again, gate, up):
        found: Tensor = module.down_proj(product)
        return found


def _norm(module: Any, hidden: Tensor) -> Tensor:
    # Of two types Liger's result has the input's, and torch's the more precise.
    if hidden.is_cuda and hidden.dtype == module.weight.dtype and (kernels := _kernels()) is not None:
        return kernels.norm(hidden, module.weight, module.variance_epsilon, 0.0, "llama", False)
    exact, rate, scaled = _scaled(module, hidden)
    with _made_again(scaled, torch.mul, exact, rate):
        found: Tensor = module.weight * scaled.to(hidden.dtype)
        return found


def _norm_in_float32(module: Any, hidden: Tensor) -> Tensor:
    if hidden.is_cuda and (kernels := _kernels()) is not None:
        return kernels.norm(hidden, module.weight, module.variance_epsilon, 0.0, "gemma", False)
    exact, rate, scaled = _scaled(module, hidden)
    with _made_again(scaled, torch.mul, exact, rate):
        found: Tensor = (module.weight * scaled).to(hidden.dtype)
        return found


def _rotated(
    plain: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *more: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if not more and not options and query.is_cuda and (kernels := _kernels()) is not None:
        return kernels.rotate(query, key, cos, sin)
    return plain(query, key, cos, sin, *more, **options)


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


def train_what_recomputes(module: torch.nn.Module) -> None:
    """Of a module in training mode, leave so only the parts that recompute activations, which transformers does in that
    mode alone: routers of experts draw noise in it."""
    for part in module.modules():
        part.training = part.training and bool(vars(part).get("gradient_checkpointing"))
