"""What matrix products are computed in, while weights, activations and sums stay fp32.

On CPUs with AMX oneDNN rounds the factors of a product to bf16 as it goes and adds up in fp32 (on others it stays in
fp32); on GPUs it is torch's autocast. Attention on a CPU is left out of it: on small blocks the conversion costs many
times what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ppo_core.spec.sections import ComputeDtype


def products_in_bf16(wanted: ComputeDtype) -> bool:
    """What `training.compute_dtype` means on this machine."""
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu.get_capabilities().get("amx_bf16", False)
    return wanted == "bfloat16" or (wanted == "auto" and fast)


def compute_in(dtype: ComputeDtype, device: torch.device) -> AbstractContextManager[None]:
    """Inside, forward and backward passes multiply in `dtype`."""
    return _bf16_products(device) if products_in_bf16(dtype) else nullcontext()


@contextmanager
def _bf16_products(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            yield
        return
    settings = _matmul()
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def in_full_precision(attend: Callable[[], Tensor]) -> Tensor:
    """Attention on a CPU, its backward pass too, in fp32 whatever `compute_in` says."""
    settings = _matmul()
    around = settings.fp32_precision
    if around != "bf16":
        return attend()
    settings.fp32_precision = "ieee"
    try:
        output = attend()
    finally:
        settings.fp32_precision = around
    if output.grad_fn is not None:

        def set_to(precision: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                settings.fp32_precision = precision

            return hook

        output.grad_fn.register_prehook(set_to("ieee"))
        output.grad_fn.register_hook(set_to(around))
    return output


def _matmul() -> Any:
    """A module whose settings are properties, which its type does not tell."""
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
