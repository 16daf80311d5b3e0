"""How much of a GPU a run's engines take: known before they start, by the models' configurations and the spec.

Bytes of a parameter (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1):

    model.dtype    weights  gradients  moments  fp32 masters
    float32        4        4          8        4 from ZeRO stage 1 on
    bfloat16       2        4          8        4

Weights are those of every network, the rest of what is trained. Networks step one after the other, and only one at a
time has gradients; but in stage 3 DeepSpeed keeps room for those of each. ZeRO shares moments and masters among ranks
from stage 1 on, gradients from 2 (and in bfloat16, where they add up in fp32, from 1), weights from 3. It averages at
most `BUCKET` gradients at once, in room that is there from the first backward pass to the last, in stage 3 for good.
The step then makes one piece of a rank's share of the gradients. A microbatch keeps about 34 bytes for each token,
layer and hidden unit in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, without attention scores), or
only a layer's input. Beside that: what the output layer works on (`models/divergence.py` has its sizes), and with fp32
weights and products in bf16 the rounded weights of one network, from its pass to its backward pass. CUDA graphs are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_core.engines.rollout_limits import Dtype
from ppo_core.models.divergence import ON_CUDA
from ppo_core.processes.ranks import BUCKET
from ppo_core.records import Sharing

GIB = 1 << 30
PROCESS_GIB = 1.0
"""About what CUDA, its libraries and their workspaces take in each engine."""
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
    `head`, an output embedding of its own, of `vocabulary` rows, and have `critic` parameters where they begin as
    another model; `references` beside them. `tokens` in a microbatch, of which `longest` are the longest sequence;
    where the model `packs` them, logits are made a part at a time. The cache is `kv_cache_gib` on each GPU, and
    `least_cache_gib` holds one sequence; vLLM computes in `sampler_dtype`. `fixed` are keys of the spec that this run
    cannot change. Weights of reward models take `reward_total_gib`, and `reward_gib` of the fullest GPU: they are on
    `reward_ranks` of all `gpus`, from the first on.
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
    critic: int | None = None

    @property
    def other(self) -> int:
        """Parameters of a network besides the policy."""
        return self.parameters - self.head if self.critic is None else self.critic

    @property
    def other_trained(self) -> int:
        """Those that learn; adapters have about as many in each."""
        return self.other if self.trained == self.parameters else self.trained

    @property
    def most_trained(self) -> int:
        """What learns in the network where that is most."""
        return max(self.trained, self.other_trained) if self.networks > 1 else self.trained

    @property
    def resting_gib(self) -> float:
        """What the training engine holds on each GPU between its jobs: weights, moments, masters, reference."""
        size, stage, ranks = self._size, self.zero_stage, self.ranks
        others = self.networks - 1
        trained = self.trained + others * self.other_trained
        weights = size * (self.parameters + self.other * others) / (ranks if stage == 3 else 1)
        masters = 0 if self.dtype == "float32" and stage == 0 else 4
        optimizer = (8 + masters) * trained / (ranks if stage >= 1 else 1)
        buckets = min(BUCKET, self.trained) + others * min(BUCKET, self.other_trained)
        gradients = 4 * trained / ranks + size * buckets if stage == 3 else 0
        return (weights + gradients + optimizer + size * self.parameters * self.references) / GIB

    @property
    def states_gib(self) -> float:
        """What it holds once the largest network, and no other, has all of its gradients."""
        gradients = 0 if self.zero_stage == 3 else 4 * self.most_trained
        return self.resting_gib + gradients / (self.ranks if self._shares_gradients else 1) / GIB

    @property
    def bucket_gib(self) -> float:
        """What averaging gradients takes that is gone before the step.

        In stage 3 that is what is sent to and what comes from the other ranks, beside the room that stays.
        """
        copies = {0: 0.0, 3: 1 + 1 / self.ranks}.get(self.zero_stage, 1.0)
        return copies * self._size * min(BUCKET, self.most_trained) / GIB

    @property
    def step_gib(self) -> float:
        """What the step of a network makes beside its gradients."""
        if self.zero_stage == 0:
            return 0.0
        share = self.most_trained / self.ranks
        together = min(SUB_GROUP, share) if self.zero_stage == 3 else share
        return 4 * together / GIB

    @property
    def learning_gib(self) -> float:
        """What training takes at least."""
        return self.states_gib + max(self.bucket_gib, self.step_gib)

    @property
    def _shares_gradients(self) -> bool:
        """Whether each rank keeps its share of the sum of gradients, and a microbatch's are beside it."""
        return self.zero_stage == 2 or (self.zero_stage == 1 and self.dtype == "bfloat16")

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
        largest = max(self.parameters - self.head, self.other if self.networks > 1 else 0)
        return 2 * (self.vocabulary * self.hidden if self.zero_stage == 3 else largest) / GIB

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
            if self._shares_gradients:  # one microbatch's gradients, before they are added to those of the others
                backward += (self.states_gib - self.resting_gib) * self._size / 4
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
