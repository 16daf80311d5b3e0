"""DeepSpeed, imported without what nothing here uses, and without a compiler."""

from __future__ import annotations

from typing import Any

import torch

from ppo_core.processes.lean_imports import absent


def _imported() -> Any:
    """The package. Its autotuner imports MLflow where there is one: 0.7 of the 4 s that a training engine needs to
    start."""
    with absent("mlflow"):
        import deepspeed
        import deepspeed.ops
    if not torch.cuda.is_available():
        # Else it compiles a shared-memory op with g++ at its first start: 35 s for nothing on one machine.
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
    return deepspeed


deepspeed = _imported()
