"""The spec of the job that trains a policy on preferences."""

from __future__ import annotations

from typing import Literal

from ppo_core.spec import DpoFitSpec, LoraSpec, Section, TrainingSpec


class TrainDpoJob(Section):
    """Train the policy of a checkpoint on preferences (DPO). Inputs: checkpoint, dataset."""

    seed: int
    dtype: Literal["float32", "bfloat16"]
    dpo: DpoFitSpec
    lora: LoraSpec | None = None
    training: TrainingSpec
    deterministic: bool = False
