"""What matrix products are computed in, while weights, sums and the optimizer stay fp32: torch's autocast.

Attention on a CPU, and what gives a single number per token, are left out of it: there it saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.spec.sections import ComputeDtype

UNITS = ("amx_bf16", "avx512_bf16")  # of CPUs; `infra.engines.hardware` looks for the same
WORTHWHILE = 256
"""The least hidden size for bf16 on a CPU: with smaller matrices, rounding costs nearly what products save."""


def products_in_bf16(wanted: ComputeDtype, hidden_size: int) -> bool:
    """What a setting (`training.compute_dtype`, or that of the sampler) means here, for a model of that hidden size."""
    if wanted != "auto":
        return wanted == "bfloat16"
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return hidden_size >= WORTHWHILE and any(capabilities.get(name, False) for name in UNITS)


def multiply_in(module: Any, dtype: ComputeDtype) -> bool:
    """Have the module's forward passes, and the backward passes after them, multiply in `dtype` from now on.

    Returns whether that is bf16. Within the module and for each pass alone: DeepSpeed switches off on GPUs what is
    around its engine, threads do not inherit it, and autocast keeps the rounded weights as long as it lasts, also when
    an optimizer changes them.
    """
    rounded = products_in_bf16(dtype, module.config.get_text_config().hidden_size)
    if rounded:
        # Not a closure: a copy of the module must get a copy of its own `forward`.
        module.forward = partial(_in_bf16, module.forward)
    return rounded


def _in_bf16(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
        return forward(*arguments, **options)


def factors(*parts: Tensor) -> tuple[Tensor, ...]:
    """What products of them are computed with, for functions that have a backward pass of their own."""
    device = parts[0].device.type
    if not torch.is_autocast_enabled(device):
        return parts
    return tuple(part.to(torch.get_autocast_dtype(device)) for part in parts)


def for_attention(*parts: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in one type: fp32 on a CPU, where on short blocks bf16 costs more than it saves."""
    device = parts[0].device.type
    if not torch.is_autocast_enabled(device):
        return parts
    dtype = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
    return tuple(part.to(dtype) for part in parts)


def in_own_precision(head: nn.Linear, hidden: Tensor) -> Tensor:
    """`head(hidden)` in the type of its weights."""
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = head(hidden.to(head.weight.dtype))
        return found
