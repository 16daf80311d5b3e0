"""What a check counts of the training engine's states is what they take: DeepSpeed decides over half of that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.engines.memory_plan import GIB, MemoryPlan
from tests.ppo_core.engines.test_gpu_memory import BILLION
from tests.ppo_core.training.programs.held_program import PIECE
from tests.ppo_core.training.update_cases import BF16, FP32

OVERHEAD = 0.01
"""Counts of steps, the value head, and padding: a hundredth of so small a model."""
BESIDE = 256
"""Bytes of what is no state: frequencies of rotary positions."""


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_states_are_counted_as_the_engine_holds_them(programs: Path, stage: int, dtype: Any) -> None:
    found = json.loads((programs / "held/states-1.json").read_text())[f"{dtype}-{stage}"]
    count = found["parameters"]
    plan = replace(BILLION, parameters=count, trained=count, references=0, dtype=dtype, zero_stage=stage)
    assert plan.resting_gib * GIB == pytest.approx(found["resting"], rel=OVERHEAD)
    assert plan.resting_gib * GIB == pytest.approx(found["afterwards"], rel=OVERHEAD)
    assert len(found["learning"]) == 4
    # In stages 2 and 3, and in bf16 in stage 1, that ends with the backward pass.
    averaging = plan.bucket_gib if (stage, dtype) == (1, "float32") else 0.0
    for held in found["learning"]:
        assert (plan.states_gib + averaging) * GIB == pytest.approx(held, rel=OVERHEAD)


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_no_moment_of_a_step_takes_more_than_is_counted(programs: Path, stage: int, dtype: Any) -> None:
    found, plan = freed(programs, stage, dtype)
    assert found["learning"] > found["held"]
    assert found["learning"] < plan.learning_gib * GIB * (1 + OVERHEAD)


@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_what_makes_room_leaves_nothing(programs: Path, stage: int, dtype: Any) -> None:
    found, plan = freed(programs, stage, dtype)
    weights = plan.parameters * 4 * 2 if stage == 0 else 0  # files that are mapped into memory
    assert found["moved"] == pytest.approx(plan.resting_gib * GIB - weights, rel=OVERHEAD)
    assert 0 <= found["left"] <= PIECE + BESIDE


@pytest.mark.parametrize("time", ["first", "second"])
@pytest.mark.parametrize(("stage", "dtype"), FP32 + BF16)
def test_a_forgotten_checkpoint_holds_no_memory(programs: Path, stage: int, dtype: Any, time: str) -> None:
    found, _ = freed(programs, stage, dtype)
    assert found[time] <= BESIDE


def freed(programs: Path, stage: int, dtype: Any) -> tuple[dict[str, int], MemoryPlan]:
    """What the program noted, and the plan of its two networks."""
    count = json.loads((programs / "held/states-1.json").read_text())[f"{dtype}-{stage}"]["parameters"]
    found = json.loads((programs / "held/freed-1.json").read_text())[f"{dtype}-{stage}"]
    plan = replace(BILLION, parameters=count, trained=count, references=0, dtype=dtype, zero_stage=stage)
    return found, plan
