"""What a run asks of a GPU: counted by hand, refused where it cannot fit, with the least change that does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ppo_core.engines.gpu_memory import changes, check_gpu_memory, check_main_memory
from ppo_core.engines.memory_plan import GIB, PROCESS_GIB, MemoryPlan
from ppo_core.engines.model_checks import rewards_gib
from ppo_core.records import InputError
from ppo_core.spec.reward.kinds import ModelRewardSpec

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


PART = 500_000_000 / GIB
"""The part of them that is averaged at once."""


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, 2 * (4 + 8) + 4 + 4),
        ({"networks": 1, "references": 0}, 16),
        ({"dtype": "bfloat16", "zero_stage": 1}, 2 * (2 + 12) + 4 + 2),
        ({"dtype": "bfloat16", "zero_stage": 1, "ranks": 4}, 2 * (2 + 12 / 4) + 4 / 4 + 2),
        ({"dtype": "bfloat16", "zero_stage": 3, "ranks": 4}, 2 * (2 / 4 + 4 / 4 + 12 / 4 + 2 * PART) + 2),
        ({"zero_stage": 1, "ranks": 4}, 2 * (4 + 12 / 4) + 4 + 4),
        ({"zero_stage": 2, "ranks": 4}, 2 * (4 + 12 / 4) + 4 / 4 + 4),
        ({"zero_stage": 3, "ranks": 4}, 2 * (4 / 4 + 4 / 4 + 12 / 4 + 4 * PART) + 4),
        ({"zero_stage": 3, "head": 3 * GIB // 4, "references": 0}, 20 + 4 * PART + 20 / 4 + 4 / 4),
        ({"trained": GIB // 128, "references": 0}, 2 * (4 + 8 / 128) + 4 / 128),
        ({"head": GIB // 4}, 12 + 12 * 0.75 + 4 + 4),
        ({"head": GIB // 4, "trained": GIB // 128, "references": 0}, 4 + 3 + 2 * 8 / 128 + 4 / 128),
        ({"critic": GIB // 4}, 12 + 12 / 4 + 4 + 4),
        ({"critic": 2 * GIB}, 12 + 12 * 2 + 4 + 4 * 2),
        ({"critic": 2 * GIB, "zero_stage": 2, "ranks": 4}, (4 + 12 / 4) * 3 + 4 + 4 * 2 / 4),
        ({"critic": 2 * GIB, "trained": GIB // 128, "references": 0}, 4 + 8 + 2 * 8 / 128 + 4 / 128),
    ],
)
def test_states_are_what_zero_says(change: dict[str, object], states: float) -> None:
    assert replace(BILLION, **change).states_gib == pytest.approx(states)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "averaging", "step"),
    [
        ({}, 0, 0),
        ({"zero_stage": 1}, 4 * PART, 4),
        ({"zero_stage": 1, "ranks": 4}, 4 * PART, 4 / 4),
        ({"zero_stage": 1, "dtype": "bfloat16"}, 2 * PART, 4),
        ({"zero_stage": 2, "dtype": "bfloat16", "ranks": 4}, 2 * PART, 4 / 4),
        ({"zero_stage": 2, "dtype": "bfloat16", "trained": GIB // 128}, 2 / 128, 4 / 128),
        ({"zero_stage": 3, "dtype": "bfloat16", "ranks": 4}, 2 * PART * (1 + 1 / 4), 4 / 4),
        ({"zero_stage": 3}, 2 * 4 * PART, 4 * 2 * PART),  # a thousand million parameters at once
    ],
)
def test_a_step_takes_what_averages_gradients_or_what_it_makes_of_them(
    change: dict[str, object], averaging: float, step: float
) -> None:
    plan = replace(BILLION, **{"layers": 0, "kv_cache_gib": 0.0, **change})  # type: ignore[arg-type]
    assert plan.bucket_gib == pytest.approx(averaging)
    assert plan.step_gib == pytest.approx(step)
    assert plan.needed_gib(surely=True) == pytest.approx(plan.states_gib + max(averaging, step))
    shared = plan.zero_stage == 2 or (plan.zero_stage == 1 and plan.dtype == "bfloat16")
    added = plan.trained * (2 if plan.dtype == "bfloat16" else 4) / plan.ranks / GIB if shared else 0
    beside = max(averaging + added, step)
    assert plan.needed_gib() == pytest.approx(plan.states_gib + beside + 2 * PROCESS_GIB)
    larger = replace(plan, layers=320)  # whose activations count beside the averaging, not beside the step
    assert larger.needed_gib() == pytest.approx(
        plan.states_gib + averaging + added + larger.activations_gib + 2 * PROCESS_GIB
    )


def test_the_fullest_gpu_holds_one_side_or_both() -> None:
    sampling, training = 4.0 + 10.0, 32.0
    activations = 32 * 34 * 2 * 4096 * 2048 / GIB  # in fp32 twice the 34 bytes of 16 bits
    assert BILLION.activations_gib == pytest.approx(activations)
    assert BILLION.needed_gib(surely=True) == training
    assert BILLION.needed_gib() == pytest.approx(training + activations + 2 * PROCESS_GIB)
    assert replace(BILLION, sharing="same").needed_gib(surely=True) == training + sampling
    assert replace(BILLION, sharing="own").needed_gib() == pytest.approx(training + activations + PROCESS_GIB)
    rounded = replace(BILLION, sharing="same", sampler_dtype="bfloat16")
    assert rounded.needed_gib(surely=True) == training + 2.0 + 10.0
    cached = replace(BILLION, kv_cache_gib=60.0, tensor_parallel_size=2)
    assert cached.needed_gib(surely=True) == 2.0 + 60.0
    checkpointed = replace(BILLION, recompute=True, products_in_bf16=True)
    assert checkpointed.activations_gib == pytest.approx((32 * 2 + 34) * 4096 * 2048 / GIB)


def test_rounded_weights_and_the_output_layer_are_estimated() -> None:
    small = replace(BILLION, vocabulary=2**17, tokens=2**10, products_in_bf16=True)  # 2 ** 27 logits
    assert small.rounded_gib == 2.0
    assert small.needed_gib(surely=True) == 32.0
    assert replace(small, head=GIB // 4).rounded_gib == 1.5
    assert replace(small, zero_stage=3, ranks=4).rounded_gib == 2 * 2**17 * 2048 / GIB  # of the output layer alone
    assert replace(small, recompute=True).rounded_gib == 2.0
    assert replace(small, recompute=True, trained=GIB // 128).rounded_gib == 0.0
    assert replace(small, dtype="bfloat16").rounded_gib == 0.0
    gradient = 2**17 * 2048 * (4 + 4) / GIB
    part = 2 * 2**26 / GIB  # of the gradient, as it is multiplied
    assert small.output_gib == pytest.approx(0.25 + part + gradient)
    assert replace(small, tokens=2**14).output_gib == pytest.approx(1.0 + part + gradient)  # in chunks
    assert replace(small, trained=GIB // 128).output_gib == pytest.approx(0.25)
    assert replace(small, products_in_bf16=False).output_gib == pytest.approx(0.5 + gradient)  # added as it is made
    assert replace(small, packs=False).output_gib == pytest.approx(4 * 0.5 + gradient)
    training = 32.0 + 2.0 + small.activations_gib + small.output_gib
    assert small.needed_gib() == pytest.approx(2 * PROCESS_GIB + training)
    sampling = replace(small, sharing="own", kv_cache_gib=80.0)
    assert sampling.needed_gib() == pytest.approx(PROCESS_GIB + 84.0 + 1024 * 2**17 * 4 / GIB)


@pytest.mark.parametrize(
    ("change", "surely", "processes"),
    [
        ({"sharing": "turns"}, 32.0, 3),
        ({"sharing": "turns", "reward_gib": 40.0}, 40.0, 3),
        ({"sharing": "same"}, 32.0 + 14.0 + 8.0, 3),
        ({"sharing": "own"}, 32.0 + 8.0, 2),
        ({"sharing": "own", "kv_cache_gib": 80.0}, 4.0 + 80.0, 1),
        ({"sharing": "own", "kv_cache_gib": 80.0, "reward_ranks": 2}, 4.0 + 80.0 + 8.0, 2),
    ],
)
def test_a_reward_model_takes_its_turn_or_lies_beside_the_others(
    change: dict[str, object], surely: float, processes: int
) -> None:
    plan = replace(BILLION, **{"reward_gib": 8.0, "gpus": 2, "layers": 0, **change})  # type: ignore[arg-type]
    assert plan.activations_gib == 0.0
    assert plan.needed_gib(surely=True) == surely
    assert plan.needed_gib() == surely + processes * PROCESS_GIB


@pytest.mark.parametrize(
    ("change", "gpu_gib", "remedy"),
    [
        ({}, 37.0, "Set the reward model's device=cpu"),
        ({"gpus": 4}, 37.0, "Set the reward model's num_ranks=4"),
        ({"gpus": 4, "reward_ranks": 4}, 37.0, "Set the reward model's device=cpu"),
    ],
)
def test_a_reward_model_that_does_not_fit_goes_elsewhere(
    change: dict[str, object], gpu_gib: float, remedy: str
) -> None:
    fixed = frozenset({"model.dtype", "model.lora.rank"})
    plan = replace(BILLION, reward_gib=8.0, sharing="own", recompute=True, tokens=1024, fixed=fixed, **change)  # type: ignore[arg-type]
    check_gpu_memory(replace(plan, reward_gib=0.0), gpu_gib)
    plan = replace(plan, reward_total_gib=8.0 * plan.reward_ranks)
    with pytest.raises(InputError, match=rf"a step takes\), 8.0 for reward models \(weights\) and 14.0 .*{remedy}$"):
        check_gpu_memory(plan, gpu_gib)


def test_weights_of_reward_models_are_counted_by_their_files(tmp_path: Path) -> None:
    numbers = {"a": torch.zeros(3, 5), "b": torch.zeros(7)}  # 22 of them
    save_file(numbers, tmp_path / "model.safetensors")
    whole, bf16, shared, elsewhere = (
        (ModelRewardSpec.model_validate({"path": "rm", **options}), tmp_path)
        for options in ({}, {"dtype": "bfloat16"}, {"num_ranks": 4}, {"device": "cpu"})
    )
    assert rewards_gib([whole]) * GIB == 22 * 4
    assert rewards_gib([bf16]) * GIB == 22 * 2
    assert rewards_gib([shared, elsewhere], on_each=True) * GIB == 22 * 4 / 4
    assert rewards_gib([whole, shared], on_each=True) * GIB == 22 * 4 + 22 * 4 / 4
    assert rewards_gib([whole, shared]) * GIB == 2 * 22 * 4
    assert rewards_gib([]) == 0


@pytest.mark.parametrize(
    ("change", "gpu_gib", "remedy"),
    [
        ({"sharing": "same", "recompute": True}, 44.0, "Set engines.placement=together"),
        ({"kv_cache_gib": 80.0}, 64.0, "Set engines.kv_cache_gib=20"),
        (
            {"networks": 1, "sharing": "own", "fixed": frozenset({"engines.offload_reference"})},
            19.9,  # bfloat16 would take 22 on one rank: 14 at rest, then 4 + 4 of gradients
            "Set training.microbatch_tokens=1024, model.lora.rank=16$",
        ),
        ({"ranks": 4, "recompute": True, "tokens": 1024}, 30.0, "Set training.zero_stage=2$"),
        ({}, 30.0, "Set model.lora.rank=16"),
        ({}, 20.0, "Set training.microbatch_tokens=1024, model.lora.rank=16"),
        (
            {"ranks": 4, "recompute": True, "tokens": 1024, "fixed": frozenset({"engines.offload_reference"})},
            17.5,
            "Set model.dtype=bfloat16, training.zero_stage=1$",
        ),
        ({"sharing": "own", "recompute": True}, 31.9, "Set engines.offload_reference=true$"),
        (
            {"sharing": "same", "fixed": frozenset({"engines.placement", "engines.offload_reference"})},
            41.0,
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
    check_main_memory(BILLION, 28.0)
    check_main_memory(replace(BILLION, sharing="own"), 1.0)
    with pytest.raises(InputError, match=r"keep 28\.0 GiB of the training engine in main memory .* has 27\.9"):
        check_main_memory(BILLION, 27.9)
    with pytest.raises(InputError, match=r"keep 36\.0 GiB of the training engine and reward models in main memory"):
        check_main_memory(replace(BILLION, reward_gib=2.0, reward_total_gib=8.0, reward_ranks=4), 35.9)


def test_what_fits_is_told() -> None:
    assert check_gpu_memory(BILLION, 80.0) == BILLION.needed_gib()
