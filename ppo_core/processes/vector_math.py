"""A defect of MKL, worked around: the first call of a vector function on several threads may be imprecise.

MKL chooses the kernel of each function (cos, exp, ...) in its first call. Where two threads make that call together, as
torch does for more than 2048 numbers, in one process of thirty one of them computed with a kernel of some four digits:
a run's first rotary embedding, and all that follows, had other bits (pytorch/pytorch#188792, MKL 2024.2).
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    *(torch.exp, torch.log, torch.log2, torch.log10, torch.sqrt, torch.trunc, torch.tanh),
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan),
    *(torch.erf, torch.erfc, torch.erfinv),
)


def prepare_vector_math() -> None:
    """Let this thread alone make the first call of each; a process that computes does this before anything else."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            function(one)
