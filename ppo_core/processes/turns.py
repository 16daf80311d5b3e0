"""Engines that take turns on one GPU (`engines.placement: together`): each makes room before another one works."""

from __future__ import annotations

import gc
from typing import Any

TAKE_TURNS = "--take-turns"
"""Tells the rollout engine at its start that it will be asked to: vLLM then allocates what it can free."""
GIB = 1 << 30


def room_made(freed: int) -> dict[str, Any]:
    """What an engine replies: bytes that its first GPU has more of now, or that it freed in main memory."""
    return {"freed_gib": freed / GIB}


def gpu_bytes_free() -> int:
    """Of the GPU that this process works with."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


def free_unused() -> None:
    """Leave to other processes what torch keeps of GPUs for later, and what lies in cycles as an engine with its hooks.

    A CPU's memory is free where `Trainable.close` empties it.
    """
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class SleepingModel:
    """vLLM's engine, which gives up weights and cache while others work.

    On GPUs by vLLM's sleep level 2: nothing is kept, since the next job comes with other weights. On a CPU, where vLLM
    has no sleep, the cache alone is freed.
    """

    def __init__(self, llm: Any, *, on_gpu: bool) -> None:
        self.llm = llm
        self.asleep = False
        self._on_gpu = on_gpu

    def sleep(self) -> int:
        """Returns the bytes that were freed."""
        if self.asleep:
            return 0
        self.asleep = True
        if not self._on_gpu:
            self.llm.reset_prefix_cache()
            return int(sum(self.llm.collective_rpc("drop_cache")))
        before = gpu_bytes_free()
        self.llm.sleep(level=2)
        return gpu_bytes_free() - before

    def wake(self) -> bool:
        """Have everything allocated again; returns whether the weights are to be loaded."""
        if not self.asleep:
            return False
        if self._on_gpu:
            self.llm.wake_up()
        else:
            self.llm.collective_rpc("restore_cache")
        self.asleep = False
        return self._on_gpu
