"""What a run asks of a GPU: counted by hand, refused where it cannot fit, with the least change that does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppo_core.engines.gpu_memory import GIB, PROCESS_GIB, MemoryPlan, changes, check_gpu_memory, check_main_memory
from ppo_core.records import InputError

BILLION = MemoryPlan(
    parameters=GIB,  # so that a byte of each is a GiB
    trained=GIB,
    head=0,
    networks=2,
    references=1,
    layers=32,
    hidden=2048,
    tokens=4096,
    longest=1024,
    dtype="float32",
    products_in_bf16=False,
    recompute=False,
    zero_stage=0,
    ranks=1,
    kv_cache_gib=10.0,
    least_cache_gib=0.5,
    tensor_parallel_size=1,
    sharing="turns",
)


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, 2 * (4 + 4 + 8) + 4),
        ({"networks": 1, "references": 0}, 16),
        ({"dtype": "bfloat16", "zero_stage": 1}, 2 * (2 + 2 + 12) + 2),
        ({"zero_stage": 1, "ranks": 4}, 2 * (4 + 4 + 8 / 4) + 4),
        ({"zero_stage": 2, "ranks": 4}, 2 * (4 + 4 / 4 + 8 / 4) + 4),
        ({"zero_stage": 3, "ranks": 4}, 2 * (4 / 4 + 4 / 4 + 8 / 4) + 4),
        ({"trained": GIB // 128, "references": 0}, 2 * (4 + 12 / 128)),
        ({"head": GIB // 4}, 16 + 16 * 0.75 + 4),
        ({"head": GIB // 4, "trained": GIB // 128, "references": 0}, 4 + 3 + 2 * 12 / 128),
    ],
)
def test_states_are_what_zero_says(change: dict[str, object], states: float) -> None:
    assert replace(BILLION, **change).states_gib == pytest.approx(states)  # type: ignore[arg-type]


def test_the_fullest_gpu_holds_one_side_or_both() -> None:
    sampling, training = 4.0 + 10.0, 36.0
    activations = 32 * 34 * 2 * 4096 * 2048 / GIB  # in fp32 twice the 34 bytes of 16 bits
    assert BILLION.activations_gib == pytest.approx(activations)
    assert BILLION.needed_gib(surely=True) == training
    assert BILLION.needed_gib() == pytest.approx(training + activations + 2 * PROCESS_GIB)
    assert replace(BILLION, sharing="same").needed_gib(surely=True) == training + sampling
    assert replace(BILLION, sharing="own").needed_gib() == pytest.approx(training + activations + PROCESS_GIB)
    cached = replace(BILLION, kv_cache_gib=60.0, tensor_parallel_size=2)
    assert cached.needed_gib(surely=True) == 2.0 + 60.0
    checkpointed = replace(BILLION, recompute=True, products_in_bf16=True)
    assert checkpointed.activations_gib == pytest.approx((32 * 2 + 34) * 4096 * 2048 / GIB)


@pytest.mark.parametrize(
    ("change", "gpu_gib", "remedy"),
    [
        ({"sharing": "same", "recompute": True}, 48.0, "Set engines.placement=together"),
        ({"kv_cache_gib": 80.0}, 64.0, "Set engines.kv_cache_gib=20"),
        (
            {"sharing": "own"},
            35.9,
            "Set training.activation_checkpointing=true, model.dtype=bfloat16, training.zero_stage=1$",
        ),
        ({"ranks": 4, "recompute": True, "tokens": 1024}, 30.0, "Set training.zero_stage=2$"),
        ({}, 30.0, "Set model.lora.rank=16"),
        ({}, 20.0, "Set training.microbatch_tokens=1024, model.lora.rank=16"),
        ({"ranks": 4, "recompute": True, "tokens": 1024}, 17.0, "Set training.zero_stage=2, model.dtype=bfloat16$"),
        (
            {"sharing": "same", "fixed": frozenset({"engines.placement"})},
            45.0,
            "Set engines.kv_cache_gib=2.5, [^l]*true$",
        ),
        ({"fixed": frozenset({"model.lora.rank", "model.dtype"})}, 20.0, "Take a smaller model, or more GPUs"),
        (
            {"ranks": 2, "zero_stage": 3},
            15.0,
            "Set .*training.zero_stage=2, model.lora.rank=16|rank=16, training.zero_stage=2",
        ),
        ({"kv_cache_gib": 80.0, "least_cache_gib": 30.0}, 72.0, "Set engines.kv_cache_gib=60"),
        ({}, 2.0, "Take a smaller model, or more GPUs"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_least_change_that_does(
    change: dict[str, object], gpu_gib: float, remedy: str
) -> None:
    plan = replace(BILLION, **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"needs at least .* GiB of a GPU and there are {gpu_gib:.1f}: .*{remedy}"):
        check_gpu_memory(plan, gpu_gib)
    for _, other in changes(plan):
        assert other.needed_gib(surely=True) <= plan.needed_gib(surely=True)


def test_what_waits_for_its_turn_needs_main_memory() -> None:
    check_main_memory(BILLION, 36.0)
    check_main_memory(replace(BILLION, sharing="own"), 1.0)
    with pytest.raises(InputError, match=r"keep 36\.0 GiB of the training engine in main memory .* has 35\.9"):
        check_main_memory(BILLION, 35.9)


def test_what_fits_is_told() -> None:
    assert check_gpu_memory(BILLION, 80.0) == BILLION.needed_gib()
