"""Whether a run's engines fit into a GPU's memory: known before they start, by the model's configuration and the spec.

Bytes of a parameter (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1):

    model.dtype    weights  gradients  moments  fp32 masters
    float32        4        4          8        -
    bfloat16       2        2          8        4

Weights are those of every network, the rest of what is trained. ZeRO shares moments and masters among ranks from
stage 1 on, gradients from 2, weights from 3. A microbatch keeps about 34 bytes for each token, layer and hidden unit
in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, without attention scores), or only a layer's input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ppo_core.records import InputError

GIB = 1 << 30
PROCESS_GIB = 1.0
"""About what CUDA, its libraries and their workspaces take in each engine."""
KEPT_PER_UNIT = 17
"""Values that a layer keeps for each token and hidden unit until its backward pass."""
Sharing = Literal["turns", "same", "own"]
"""Engines take turns on a GPU, work on the same one with all that they hold, or have their own."""


@dataclass(frozen=True)
class MemoryPlan:
    """What decides how much each GPU has to hold.

    `parameters` of one network, of which `trained` learn; `networks` under training, and `references` beside them.
    `tokens` in a microbatch, of which `longest` are the longest sequence. The cache is `kv_cache_gib` on each GPU.
    """

    parameters: int
    trained: int
    networks: int
    references: int
    layers: int
    hidden: int
    tokens: int
    longest: int
    dtype: Literal["float32", "bfloat16"]
    products_in_bf16: bool
    recompute: bool
    zero_stage: int
    ranks: int
    kv_cache_gib: float
    tensor_parallel_size: int
    sharing: Sharing

    @property
    def states_gib(self) -> float:
        """What the training engine holds on each GPU when it rests on it: weights, gradients, moments, reference."""
        size, masters = (2, 4) if self.dtype == "bfloat16" else (4, 0)
        stage, ranks = self.zero_stage, self.ranks
        weights = size * self.parameters * self.networks / (ranks if stage == 3 else 1)
        gradients = size * self.trained * self.networks / (ranks if stage >= 2 else 1)
        optimizer = (8 + masters) * self.trained * self.networks / (ranks if stage >= 1 else 1)
        return (weights + gradients + optimizer + size * self.parameters * self.references) / GIB

    @property
    def activations_gib(self) -> float:
        """About what a microbatch keeps for its backward pass."""
        size = 2 if self.products_in_bf16 or self.dtype == "bfloat16" else 4
        kept = self.layers + KEPT_PER_UNIT if self.recompute else self.layers * KEPT_PER_UNIT
        return size * kept * self.tokens * self.hidden / GIB

    @property
    def rollout_gib(self) -> float:
        """Weights and cache of the rollout engine on each GPU."""
        size = 2 if self.dtype == "bfloat16" else 4
        return size * self.parameters / self.tensor_parallel_size / GIB + self.kv_cache_gib

    def needed_gib(self, *, surely: bool = False) -> float:
        """On the fullest GPU, about; `surely`: at least, which leaves out what is only estimated."""
        rest, training = 0.0 if surely else PROCESS_GIB, self.states_gib + (0.0 if surely else self.activations_gib)
        match self.sharing:
            case "turns":
                return 2 * rest + max(training, self.rollout_gib)
            case "same":
                return 2 * rest + training + self.rollout_gib
            case "own":
                return rest + max(training, self.rollout_gib)


def check_gpu_memory(plan: MemoryPlan, gpu_gib: float) -> float:
    """About what the plan needs of each GPU, GiB.

    Raises InputError where it cannot fit into `gpu_gib`, naming the least change of the spec that fits.
    """
    if plan.needed_gib(surely=True) > gpu_gib:
        remedy = next((told for told, other in changes(plan) if other.needed_gib() <= gpu_gib), None)
        remedy = remedy or "take a smaller model, or more GPUs (training.zero_stage=3 shares all states among them)"
        how = {"turns": "one after the other", "same": "at the same time", "own": "each on its own"}[plan.sharing]
        raise InputError(
            f"this run needs at least {plan.needed_gib(surely=True):.1f} GiB of a GPU and there are {gpu_gib:.1f}: "
            f"{plan.states_gib:.1f} for training (weights, gradients, moments and reference) and "
            f"{plan.rollout_gib:.1f} for sampling (weights and cache), {how}. {remedy[0].upper()}{remedy[1:]}"
        )
    return plan.needed_gib()


def changes(plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Other plans with what to set for them, few changes before many; those with adapters, which learn less, last."""
    steps = list(_steps(plan))
    adapters = [("model.lora.rank=16", with_adapters)] if plan.trained == plan.parameters else []
    for added in ([], adapters) if adapters else ([],):
        for size in range(len(steps) + 1):
            for chosen in itertools.combinations(steps, size):
                other = plan
                for _, change in (*chosen, *added):
                    other = change(other)
                yield f"set {', '.join(told for told, _ in (*chosen, *added))}", other


def with_adapters(plan: MemoryPlan) -> MemoryPlan:
    """About a hundredth of the weights learn, and the reference is the policy without them."""
    return replace(plan, trained=plan.parameters // 100, references=0, zero_stage=min(plan.zero_stage, 2))


def _steps(plan: MemoryPlan) -> Iterator[tuple[str, Callable[[MemoryPlan], MemoryPlan]]]:
    if plan.sharing == "same":
        yield "engines.placement=together", lambda one: replace(one, sharing="turns")
    if plan.kv_cache_gib > 1:
        cache = max(1.0, plan.kv_cache_gib / 4)
        yield f"engines.kv_cache_gib={cache:g}", lambda one: replace(one, kv_cache_gib=cache)
    if plan.tokens > plan.longest:
        yield f"training.microbatch_tokens={plan.longest}", lambda one: replace(one, tokens=one.longest)
    if not plan.recompute:
        yield "training.activation_checkpointing=true", lambda one: replace(one, recompute=True)
    if plan.ranks > 1 and plan.zero_stage < 2:
        yield "training.zero_stage=2", lambda one: replace(one, zero_stage=2)
    if plan.dtype == "float32":
        stage = max(1, plan.zero_stage)
        told = f"model.dtype=bfloat16 with training.zero_stage={stage}"
        yield told, lambda one: replace(one, dtype="bfloat16", zero_stage=max(1, one.zero_stage))
