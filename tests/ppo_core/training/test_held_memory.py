"""What a check counts of the training engine's states is what they take: DeepSpeed decides over half of that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.engines.gpu_memory import GIB
from tests.ppo_core.engines.test_gpu_memory import BILLION
from tests.ppo_core.training.update_cases import BF16, FP32

OVERHEAD = 0.01
"""Counts of steps, the value head, and padding: a hundredth of so small a model."""


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_states_are_counted_as_the_engine_holds_them(programs: Path, stage: int, dtype: Any) -> None:
    found = json.loads((programs / "held/states-1.json").read_text())[f"{dtype}-{stage}"]
    count = found["parameters"]
    plan = replace(BILLION, parameters=count, trained=count, references=0, dtype=dtype, zero_stage=stage)
    assert plan.resting_gib * GIB == pytest.approx(found["resting"], rel=OVERHEAD)
    assert plan.resting_gib * GIB == pytest.approx(found["afterwards"], rel=OVERHEAD)
    assert len(found["learning"]) == 4
    for held in found["learning"]:
        assert plan.states_gib * GIB == pytest.approx(held, rel=OVERHEAD)
