"""Settings of a spec that have no effect on this machine."""

from __future__ import annotations

from infra.engines.hardware import has_bf16_units, has_nvidia_gpu
from ppo_core.spec import RunSpec


def machine_notes(spec: RunSpec) -> list[str]:
    """What a person should know before the run starts; nothing where the training engine is on another machine."""
    here = spec.engines.backend == "local" and not has_nvidia_gpu()
    if here and spec.training.compute_dtype == "bfloat16" and not has_bf16_units():
        return [
            "training.compute_dtype=bfloat16 gains nothing here: this processor has no units for it (AVX512-BF16 or "
            "AMX), and may take several times as long as in float32; auto takes what is faster"
        ]
    return []
