"""The same bits again from the same job, on a GPU too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, torch takes deterministic kernels only, where `wanted`, and any that it likes elsewhere.

    On a GPU the process also needs CUBLAS_WORKSPACE_CONFIG in its environment. On a CPU nothing changes.
    """
    cudnn, memory = torch.backends.cudnn, _memory()
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    cudnn_before = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(wanted)
    # That would write NaN over all new memory, to find bugs: no kernel of ours reads it.
    memory.fill_uninitialized_memory = False
    cudnn.deterministic, cudnn.benchmark = wanted, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
        cudnn.deterministic, cudnn.benchmark = cudnn_before


def _memory() -> Any:
    """A module whose settings are properties, which its type does not tell."""
    return torch.utils.deterministic
