"""DeepSpeed, imported without what nothing here uses, and without a compiler."""

from __future__ import annotations

import sys

import torch

# Its autotuner imports MLflow where there is one: 0.7 of the 4 s that a training engine needs to start.
SPARED = [name for name in ("mlflow",) if name not in sys.modules]
sys.modules.update(dict.fromkeys(SPARED))  # type: ignore[arg-type]
try:
    if not torch.cuda.is_available():
        # Else it compiles a shared-memory op with g++ at its first start: 35 s for nothing on one machine.
        import deepspeed.ops

        deepspeed.ops.__dict__["__compatible_ops__"] = {}

    import deepspeed
finally:
    for name in SPARED:
        del sys.modules[name]

__all__ = ["deepspeed"]
