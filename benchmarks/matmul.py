"""How fast this machine multiplies matrices: what updates are compared with."""

from __future__ import annotations

import statistics
import time

import torch


def matmul_rate(dtype: str) -> float:
    """FLOP/s of a large matrix product here: what no update can pass.

    A CPU without instructions for `dtype` would take minutes for the largest: one of a quarter of a second is enough.
    """
    device, largest = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 2048)
    size = 256
    while size < largest and 8 * product_seconds(size, dtype, device, 1) < 0.25:
        size *= 2
    return 2 * size**3 / product_seconds(size, dtype, device, 6)


def product_seconds(size: int, dtype: str, device: str, times: int) -> float:
    """The median of so many, after one that nobody counts."""
    a, measured = torch.randn(size, size, dtype=getattr(torch, dtype), device=device), list[float]()
    for _ in range(1 + times):
        synchronize()
        began = time.perf_counter()
        a @ a
        synchronize()
        measured.append(time.perf_counter() - began)
    return statistics.median(measured[1:])


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
