"""Whether a run's engines fit into a GPU's memory, and which changes of the spec make them fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ppo_core.engines.memory_plan import MemoryPlan
from ppo_core.engines.rollout_limits import rounded_up
from ppo_core.records import InputError

REWARD_RANKS, REWARD_DEVICE = "the reward model's num_ranks", "the reward model's device"
OFFLOAD = "engines.offload_reference"


def check_gpu_memory(plan: MemoryPlan, gpu_gib: float) -> float:
    """About what the plan needs of each GPU, GiB.

    Raises InputError where it cannot fit into `gpu_gib`, naming the least change of the spec that fits.
    """
    if plan.needed_gib(surely=True) > gpu_gib:
        remedy = next((change for change, other in changes(plan) if other.needed_gib() <= gpu_gib), None)
        remedy = remedy or "take a smaller model, or more GPUs (training.zero_stage=3 shares all states among them)"
        scoring = f", {plan.reward_gib:.1f} for reward models (weights)" if plan.reward_gib else ""
        how = {"turns": "one after the other", "same": "at the same time", "own": "each on its own"}[plan.sharing]
        raise InputError(
            f"this run needs at least {plan.needed_gib(surely=True):.1f} GiB of a GPU and there are {gpu_gib:.1f}: "
            f"{plan.learning_gib:.1f} for training (weights, gradients, moments, reference, and what a step takes)"
            f"{scoring} and {plan.rollout_gib:.1f} for sampling (weights and cache), {how}. "
            f"{remedy[0].upper()}{remedy[1:]}"
        )
    return plan.needed_gib()


def check_main_memory(plan: MemoryPlan, memory_gib: float) -> None:
    """Raise InputError where engines that take turns have no room in main memory for what waits there."""
    waiting = plan.resting_gib * plan.ranks + plan.reward_total_gib
    whose = "the training engine and reward models" if plan.reward_gib else "the training engine"
    if plan.sharing == "turns" and waiting > memory_gib:
        raise InputError(
            f"engines that take turns on a GPU (engines.placement) keep {waiting:.1f} GiB of {whose} in "
            f"main memory while the policy samples, and this machine has {memory_gib:.1f}, a container's limit "
            "counted: set engines.placement=apart, or take a smaller model"
        )


Change = Mapping[str, float | str]
"""Keys of the spec, and what to set them to."""


def changes(plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Other plans with what to set for them, few changes before many; those with adapters, which learn less, last.

    Not those that surely take more: bfloat16 with masters may, on one rank, for its gradients in fp32 at the step.
    """
    steps = [step for step in _steps(plan) if not plan.fixed.intersection(step)]
    adapters: Change = {"model.lora.rank": 16, **({"training.zero_stage": 2} if plan.zero_stage == 3 else {})}
    adaptable = plan.trained == plan.parameters and "model.lora.rank" not in plan.fixed
    endings: list[list[Change]] = [[], [adapters]] if adaptable else [[]]
    for last in endings:
        for size in range(len(steps) + 1):
            for chosen in itertools.combinations(steps, size):
                settings: dict[str, float | str] = {}
                for step in (*chosen, *last):
                    stage = max(int(settings.get("training.zero_stage", 0)), int(step.get("training.zero_stage", 0)))
                    settings |= {**step, **({"training.zero_stage": stage} if stage else {})}
                other = changed(plan, settings)
                if other.needed_gib(surely=True) <= plan.needed_gib(surely=True):
                    yield "set " + ", ".join(f"{key}={value}" for key, value in settings.items()), other


def changed(plan: MemoryPlan, settings: Change) -> MemoryPlan:
    """The plan with other settings. Of adapters about a hundredth of the weights learn, and the reference is the policy
    without them."""
    adapted = "model.lora.rank" in settings
    reward_ranks = int(settings.get(REWARD_RANKS, plan.reward_ranks))
    whole = 0.0 if REWARD_DEVICE in settings else plan.reward_total_gib
    on_fullest = whole / reward_ranks if REWARD_RANKS in settings else min(plan.reward_gib, whole)
    return replace(
        plan,
        sharing="turns" if "engines.placement" in settings else plan.sharing,
        kv_cache_gib=float(settings.get("engines.kv_cache_gib", plan.kv_cache_gib)),
        tokens=int(settings.get("training.microbatch_tokens", plan.tokens)),
        recompute=plan.recompute or "training.activation_checkpointing" in settings,
        zero_stage=int(settings.get("training.zero_stage", plan.zero_stage)),
        dtype="bfloat16" if "model.dtype" in settings else plan.dtype,
        sampler_dtype="bfloat16" if "rollout.dtype" in settings else plan.sampler_dtype,
        trained=plan.parameters // 100 if adapted else plan.trained,
        references=0 if adapted or OFFLOAD in settings else plan.references,
        reward_gib=on_fullest,
        reward_total_gib=whole,
        reward_ranks=reward_ranks,
    )


def _steps(plan: MemoryPlan) -> Iterator[Change]:
    """Single changes that take less memory, from the cheapest on."""
    if plan.sharing == "same":
        yield {"engines.placement": "together"}
    if plan.reward_gib and plan.reward_ranks < plan.gpus:
        yield {REWARD_RANKS: plan.gpus}
    smaller = max(rounded_up(2 * plan.least_cache_gib), rounded_up(plan.kv_cache_gib / 4))
    if smaller < plan.kv_cache_gib:
        yield {"engines.kv_cache_gib": smaller}
    if plan.tokens > plan.longest:
        yield {"training.microbatch_tokens": plan.longest}
    if plan.references:
        yield {OFFLOAD: "true"}
    if not plan.recompute:
        yield {"training.activation_checkpointing": "true"}
    if "bfloat16" not in (plan.dtype, plan.sampler_dtype):
        yield {"rollout.dtype": "bfloat16"}
    if plan.ranks > 1 and plan.zero_stage < 2:
        yield {"training.zero_stage": 2}
    if plan.reward_gib:
        yield {REWARD_DEVICE: "cpu"}
    if plan.dtype == "float32":
        yield {"model.dtype": "bfloat16", **({} if plan.zero_stage else {"training.zero_stage": 1})}
