"""Whether a run's engines fit into a GPU's memory: known before they start, by the model's configuration and the spec.

Bytes of a parameter (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1):

    model.dtype    weights  gradients  moments  fp32 masters
    float32        4        4          8        4 from ZeRO stage 1 on
    bfloat16       2        2          8        4

Weights are those of every network, the rest of what is trained. Networks step one after the other, and only one at a
time has gradients; but in stage 3 DeepSpeed keeps room for those of each. ZeRO shares moments and masters among ranks
from stage 1 on, gradients from 2, weights from 3. It averages at most `BUCKET` gradients at once, in room that is there
from the first backward pass to the last, in stage 3 for good. The step then makes one piece of a rank's share of the
gradients, and in bfloat16 another one in fp32. A microbatch keeps about 34 bytes for each token, layer and hidden
unit in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, without attention scores), or only a layer's
input. Beside that: what the output layer works on (`models/divergence.py` has its sizes), and with fp32 weights and
products in bf16 the rounded weights of one network, from its pass to its backward pass. CUDA graphs are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ppo_core.engines.rollout_limits import Dtype, rounded_up
from ppo_core.models.divergence import ON_CUDA
from ppo_core.processes.ranks import BUCKET
from ppo_core.records import InputError, Sharing

GIB = 1 << 30
PROCESS_GIB = 1.0
"""About what CUDA, its libraries and their workspaces take in each engine."""
REWARD_RANKS, REWARD_DEVICE = "the reward model's num_ranks", "the reward model's device"
OFFLOAD = "engines.offload_reference"
KEPT_PER_UNIT = 17
"""Values that a layer keeps for each token and hidden unit until its backward pass."""
SEQUENCES = 1024
"""At most so many does vLLM sample a token for at once, on large GPUs; their logits are fp32."""
UNPACKED = 4
"""Logits in fp32, and what is as large as they are, where the output layer makes all of them at once."""
SUB_GROUP = 1_000_000_000
"""Parameters that a rank steps together in stage 3, at most: DeepSpeed's own."""


@dataclass(frozen=True)
class MemoryPlan:
    """What decides how much each GPU has to hold.

    `parameters` of the policy, of which `trained` learn; `networks` under training, of which all but one lack the
    `head`, an output embedding of its own, of `vocabulary` rows; `references` beside them. `tokens` in a microbatch, of
    which `longest` are the longest sequence; where the model `packs` them, logits are made a part at a time. The cache
    is `kv_cache_gib` on each GPU, and `least_cache_gib` holds one sequence; vLLM computes in `sampler_dtype`. `fixed`
    are keys of the spec that this run cannot change. Weights of reward models take `reward_total_gib`, and `reward_gib`
    of the fullest GPU: they are on `reward_ranks` of all `gpus`, from the first on.
    """

    parameters: int
    trained: int
    head: int
    networks: int
    references: int
    layers: int
    hidden: int
    tokens: int
    longest: int
    dtype: Dtype
    products_in_bf16: bool
    recompute: bool
    zero_stage: int
    ranks: int
    kv_cache_gib: float
    least_cache_gib: float
    tensor_parallel_size: int
    sharing: Sharing
    fixed: frozenset[str] = frozenset()
    reward_gib: float = 0.0
    reward_total_gib: float = 0.0
    reward_ranks: int = 1
    gpus: int = 1
    vocabulary: int = 0
    packs: bool = True
    sampler_dtype: Dtype = "float32"

    @property
    def resting_gib(self) -> float:
        """What the training engine holds on each GPU between its jobs: weights, moments, masters, reference."""
        size, stage, ranks = self._size, self.zero_stage, self.ranks
        others = self.networks - 1
        others_trained = self.trained - (self.head if self.trained == self.parameters else 0)
        trained = self.trained + others * others_trained
        weights = size * (self.parameters * self.networks - self.head * others) / (ranks if stage == 3 else 1)
        masters = 0 if self.dtype == "float32" and stage == 0 else 4
        optimizer = (8 + masters) * trained / (ranks if stage >= 1 else 1)
        buckets = min(BUCKET, self.trained) + others * min(BUCKET, others_trained)
        gradients = size * (trained / ranks + buckets) if stage == 3 else 0
        return (weights + gradients + optimizer + size * self.parameters * self.references) / GIB

    @property
    def states_gib(self) -> float:
        """What it holds once the largest network, and no other, has all of its gradients."""
        gradients = 0 if self.zero_stage == 3 else self._size * self.trained
        return self.resting_gib + gradients / (self.ranks if self.zero_stage == 2 else 1) / GIB

    @property
    def bucket_gib(self) -> float:
        """What averaging gradients takes that is gone before the step.

        In stage 3 that is what is sent to and what comes from the other ranks, beside the room that stays.
        """
        copies = {0: 0.0, 3: 1 + 1 / self.ranks}.get(self.zero_stage, 1.0)
        return copies * self._size * min(BUCKET, self.trained) / GIB

    @property
    def step_gib(self) -> float:
        """What the step of a network makes beside its gradients."""
        if self.zero_stage == 0:
            return 0.0
        share = self.trained / self.ranks
        together = min(SUB_GROUP, share) if self.zero_stage == 3 else share
        return (4 + (2 if self.dtype == "bfloat16" else 0)) * together / GIB

    @property
    def learning_gib(self) -> float:
        """What training takes at least."""
        return self.states_gib + max(self.bucket_gib, self.step_gib)

    @property
    def _size(self) -> int:
        """Bytes of a weight."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def rounded_gib(self) -> float:
        """About what a network's pass leaves of its weights in bf16 for the backward pass.

        ZeRO 3 makes its layers' anew, and recomputing a layer those that do not learn.
        """
        if not self.products_in_bf16 or self.dtype == "bfloat16" or (self.recompute and self.trained < self.parameters):
            return 0.0
        return 2 * (self.vocabulary * self.hidden if self.zero_stage == 3 else self.parameters - self.head) / GIB

    @property
    def output_gib(self) -> float:
        """About what the output layer needs of a microbatch: logits, and its gradient in fp32, of which a part is made
        at a time, beside that of the input embedding, which is as large."""
        size = 2 if self.products_in_bf16 or self.dtype == "bfloat16" else 4
        logits = self.tokens * self.vocabulary
        gradient = self.vocabulary * self.hidden * (4 + (2 if self.dtype == "bfloat16" else 4))
        whole = gradient if self.trained == self.parameters else 0
        if not self.packs:
            return (4 * UNPACKED * logits + whole) / GIB
        part = size * min(self.vocabulary * self.hidden, ON_CUDA.product) if whole and size == 2 else 0
        return (size * min(logits, ON_CUDA.kept) + part + whole) / GIB

    @property
    def activations_gib(self) -> float:
        """About what a microbatch keeps for its backward pass."""
        size = 2 if self.products_in_bf16 or self.dtype == "bfloat16" else 4
        kept = self.layers + KEPT_PER_UNIT if self.recompute else self.layers * KEPT_PER_UNIT
        return size * kept * self.tokens * self.hidden / GIB

    @property
    def rollout_gib(self) -> float:
        """Weights and cache of the rollout engine on each GPU."""
        size = 2 if "bfloat16" in (self.dtype, self.sampler_dtype) else 4
        return size * self.parameters / self.tensor_parallel_size / GIB + self.kv_cache_gib

    @property
    def sampler_gib(self) -> float:
        """The logits of a step of sampling."""
        return 4 * SEQUENCES * self.vocabulary / GIB

    def needed_gib(self, *, surely: bool = False) -> float:
        """On the fullest GPU, about; `surely`: at least, which leaves out what is only estimated."""
        rest, training, rollout = 0.0, self.learning_gib, self.rollout_gib
        if not surely:
            rest, rollout = PROCESS_GIB, rollout + self.sampler_gib
            backward = self.bucket_gib + self.rounded_gib + self.activations_gib + self.output_gib
            if self.zero_stage == 2:  # one microbatch's gradients, before they are added to those of the others
                backward += self.states_gib - self.resting_gib
            training = self.states_gib + max(backward, self.step_gib)
        scoring = rest if self.reward_gib else 0.0
        match self.sharing:
            case "turns":
                return 2 * rest + scoring + max(training, rollout, self.reward_gib)
            case "same":
                return 2 * rest + scoring + training + rollout + self.reward_gib
            case "own":
                # The training engine has the first GPUs, and so have reward models.
                beside = scoring + self.reward_gib
                sampling = rollout + (beside if self.reward_ranks > self.ranks else 0.0)
                return rest + max(training + beside, sampling)


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
            f"main memory while the policy samples, and this machine has {memory_gib:.1f}: set "
            "engines.placement=apart, or take a smaller model"
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
