"""The sections of a run's spec: frozen, torch-free, each bound checked before any work starts.

A class's defaults are the vetted recipe. Each stage reads only its own sections, and only those enter its cache key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from ppo_core.spec.dataset import DatasetSpec
from ppo_core.spec.lora import LoraSpec
from ppo_core.spec.paths import ModelPath, UserPath
from ppo_core.spec.section import Beta, Fraction, LearningRate, Section, WeightDecay

EvaluatedWeights = Literal["policy", "ema"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 10.0
Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]


class ModelSpec(Section):
    """Where the policy starts: an existing Hugging Face model, or the configuration of a new one."""

    path: ModelPath | None = Field(
        None, description="Folder of a Hugging Face causal LM, or its name on the Hub: hf://OWNER/NAME@REVISION"
    )
    config: dict[str, Any] | None = Field(
        None, description="Hugging Face configuration of a new model with random weights"
    )
    tokenizer: ModelPath | None = Field(
        None, description="Folder of the tokenizer, or its name on the Hub; none: the model's own"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of the weights in forward and backward passes"
    )
    lora: LoraSpec | None = Field(
        None,
        description="PPO trains low-rank adapters instead of all weights; none: all weights. `sft` always trains all",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("set exactly one of path (an existing model) and config (the configuration of a new one)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("config has no model_type: name the architecture, for example model_type: llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a new model has no tokenizer: name a folder with one in model.tokenizer")
        return self


class RunModelSpec(ModelSpec):
    """The models of a run that trains a critic too. Jobs have a `ModelSpec` alone: the critic's folder is an input."""

    critic: ModelPath | None = Field(
        None,
        description="Folder that the critic begins as, or its name on the Hub: a reward model, whose scores are the "
        "first values, or a causal LM; none: the policy. With the policy's tokens; of any size",
    )

    def problems(self, algorithm: str, meaningless: Mapping[str, str]) -> list[str]:
        """A critic where the `algorithm` has none of its own: then its rate is among the `meaningless` settings."""
        reason = meaningless.get("update.critic_learning_rate")
        if self.critic is None or reason is None:
            return []
        return [
            f"model.critic={self.critic} has no effect with algorithm.kind={algorithm} ({reason}): leave it out, or "
            "set algorithm.kind to ppo"
        ]


class SupervisedSpec(Section):
    """The supervised start (SFT): cross-entropy on the completions."""

    data: UserPath = Field(
        description="Examples in any form of dataset.train; prompts get the same chat template and system prompt"
    )
    prompt_column: str = Field("prompt", min_length=1, description="Column with the prompt of an example")
    completion_column: str = Field("completion", min_length=1, description="Column with the completion to learn")
    num_steps: PositiveInt = Field(750, description="Optimizer steps")
    batch_size: PositiveInt = Field(32, description="Examples per optimizer step")
    learning_rate: LearningRate = Field(1.5e-3, description="Peak learning rate, reached at the end of the warm-up")
    warmup_steps: int = Field(30, ge=0, description="Optimizer steps of linear warm-up, cut to num_steps")
    final_lr_fraction: Fraction = Field(0.1, description="Cosine decay ends at this fraction of learning_rate")
    weight_decay: WeightDecay = Field(0.01, description="Decoupled weight decay of AdamW")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="AdamW's decay rates of the two moments")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm")


class DynamicSamplingSpec(Section):
    """Replace prompts whose responses all got the same score by others (Yu et al. 2025, DAPO, section 3.2)."""

    max_batches: int = Field(
        ge=2,
        le=64,
        description="At most this many batches of prompts_per_iteration prompts are drawn per iteration; if too few "
        "prompts have differing scores even then, the first of the others fill the iteration up",
    )


class RolloutSpec(Section):
    """What the policy samples in one iteration."""

    prompts_per_iteration: PositiveInt = Field(256, description="Prompts drawn from the dataset per iteration")
    samples_per_prompt: PositiveInt = Field(1, description="Responses to each prompt; 2 or more for rloo and grpo")
    dynamic_sampling: DynamicSamplingSpec | None = Field(
        None,
        description="Draw more prompts in place of those whose responses all got the same score; for rloo and grpo",
    )
    max_response_tokens: PositiveInt = Field(48, description="Longest response in tokens; generation stops there")
    max_response_tokens_column: str | None = Field(
        None,
        min_length=1,
        description="Column with a lower limit for single prompts; empty, and for held-out prompts: the spec's limit",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Texts that end a response besides EOS, and stay part of it; set them again wherever the policy is "
        "served. For special tokens use stop_token_ids",
    )
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(
        (), description="Ids of tokens that end a response besides EOS, and stay part of it"
    )
    temperature: Temperature = Field(1.0, description="Sampling temperature; the trainer divides its logits by it too")
    temperature_column: str | None = Field(
        None,
        min_length=1,
        description="Column with a temperature for single prompts; empty, and for held-out prompts: the spec's",
    )
    dtype: ComputeDtype = Field(
        "auto",
        description="Data type of weights, products and cache of the sampler, while the policy's weights stay as "
        "model.dtype has them; auto: as training.compute_dtype says, on the sampler's own machine",
    )
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Must stay 1 while logprobs are trained on")
    top_k: int = Field(-1, ge=-1, description="Must stay -1 (off) while logprobs are trained on")

    @property
    def num_responses(self) -> int:
        """Responses of one iteration, B."""
        return self.prompts_per_iteration * self.samples_per_prompt

    def compute_dtype(self, training: TrainingSpec) -> ComputeDtype:
        """What the sampler computes in; auto: what suits the machine and the model."""
        return training.compute_dtype if self.dtype == "auto" else self.dtype

    def problems(self, dataset: DatasetSpec) -> list[str]:
        """Columns of numbers that hold something else, and so are none of those that a prompt has besides."""
        keys = {dataset.prompt_column: "dataset.prompt_column", dataset.answer_column: "dataset.answer_column"}
        named = {
            "rollout.temperature_column": self.temperature_column,
            "rollout.max_response_tokens_column": self.max_response_tokens_column,
        }
        return [
            f"{key}={column} is {keys[column]} too, and would have no effect: name a column of its own, or leave it out"
            for key, column in named.items()
            if column in keys
        ]

    @model_validator(mode="after")
    def _full_distribution(self) -> Self:
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k} cut the sampling distribution, but PPO trains on the full "
                "softmax: the ratios would be wrong. Set top_p: 1 and top_k: -1"
            )
        return self


class TrainingSpec(Section):
    """How the training engine runs."""

    num_ranks: PositiveInt = Field(1, description="Number of DeepSpeed ranks: GPUs, or processes on CPU")
    zero_stage: int = Field(
        0,
        ge=0,
        le=3,
        description="ZeRO stage, what ranks shard: 0 nothing, 1 optimizer state (of bfloat16 also gradients), 2 also "
        "gradients, 3 also weights",
    )
    microbatch_tokens: PositiveInt | None = Field(
        None,
        description="Most tokens per backward pass and rank; none: 4096, or the longest sequence. Changes memory and "
        "speed only",
    )
    microbatch_size: PositiveInt | None = Field(
        None, description="Most sequences per backward pass and rank; none: as many as microbatch_tokens allows"
    )
    compute_dtype: ComputeDtype = Field(
        "auto",
        description="Precision of matrix products, by autocast, while weights and optimizer stay fp32; auto: bfloat16 "
        "on GPUs, and on CPUs with AVX512-BF16 or AMX for models of a hidden size of at least 256",
    )
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass")


class EvaluationSpec(Section):
    """Held-out prompts, sampled and greedy."""

    every: PositiveInt = Field(
        5, description="Iterations between evaluations; the start and the last iteration are always evaluated"
    )
    num_prompts: PositiveInt = Field(256, description="Held-out prompts per evaluation")
    pass_score: float = Field(1.0, description="A response whose score reaches this counts as accurate")
    weights: EvaluatedWeights = Field(
        "policy",
        description="Weights that are evaluated, registered and exported: the policy as trained, or its moving average "
        "(update.ema_decay)",
    )

    def notes(self, dataset: DatasetSpec) -> list[str]:
        """How to evaluate, where no prompts are held out: a note, so that one key turns evaluations off."""
        names, fields = ("every", "num_prompts", "pass_score"), type(self).model_fields
        idle = [f"evaluation.{one}={vars(self)[one]}" for one in names if vars(self)[one] != fields[one].default]
        if dataset.evaluates or not idle:
            return []
        return [
            f"nothing is evaluated without held-out prompts, and {' and '.join(idle)} without effect: set "
            "dataset.evaluation or evaluation_fraction"
        ]


class EnginesSpec(Section):
    """Where engines run, how many, how long they may be silent, and what the rollout engine takes.

    No result depends on where or how many.
    """

    backend: Literal["local", "ray"] = Field(
        "local",
        description="local: child processes on this machine; ray: rollout and training engines on nodes of a Ray "
        "cluster, with the store in S3. Scoring, which runs your code, is always local",
    )
    address: str | None = Field(
        None,
        pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$",
        description="HOST:PORT of the Ray head; none: RAY_ADDRESS, or the cluster that this machine belongs to",
    )
    rollout_resources: dict[str, PositiveFloat] = Field(
        {},
        description="Ray resources of each rollout engine, as in {GPU: 1}; none: {GPU: tensor_parallel_size}",
    )
    training_resources: dict[str, PositiveFloat] = Field(
        {}, description="Ray resources of the training engine; none: {GPU: training.num_ranks}"
    )
    placement: Literal["auto", "together", "apart"] = Field(
        "auto",
        description="together: rollout and training engines take turns on the same GPUs, each making room for the "
        "other; apart: each keeps what it holds, on GPUs of its own where there are enough; auto: together where GPUs "
        "are fewer than the engines need",
    )
    offload_reference: bool = Field(
        False,
        description="On GPUs: keep the frozen reference in main memory but while it is asked, once in an iteration, so "
        "that the update has its room",
    )
    placement_timeout_s: PositiveFloat = Field(
        600.0, description="Seconds that an engine waits for a Ray node with its resources"
    )
    timeout_s: PositiveFloat = Field(
        1800.0, description="Seconds without progress after which an engine is taken to be hung"
    )
    reward_timeout_s: PositiveFloat = Field(
        300.0, description="Seconds without progress after which the rewards are taken to be hung"
    )
    kv_cache_gib: PositiveFloat = Field(1.0, description="Size of vLLM's key-value cache, GiB per GPU or CPU rank")
    rollout_engines: int = Field(
        1, ge=1, le=256, description="Rollout engines that share an iteration's prompts; results do not depend on it"
    )
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs per rollout engine")
    deterministic: bool = Field(
        False,
        description="On GPUs: deterministic kernels and batch-invariant sampling, which are slower, so that the same "
        "job gives the same bits again. On CPU it always does",
    )

    def notes(self) -> list[str]:
        """What is for a Ray cluster, where there is none: a note, so that one key runs a spec on this machine."""
        names, fields = ("address", "rollout_resources", "training_resources", "placement_timeout_s"), vars(self)
        idle = [f"engines.{one}" for one in names if fields[one] != type(self).model_fields[one].default]
        if self.backend == "ray" or not idle:
            return []
        return [f"{' and '.join(idle)} without effect: engines.backend=local runs all engines here; ray uses a cluster"]

    @model_validator(mode="after")
    def _turns_are_taken_on_one_machine(self) -> Self:
        if self.placement == "together" and self.backend == "ray":
            raise ValueError(
                "placement=together with backend=ray: Ray gives each engine GPUs of its own; set backend to local, or "
                "placement to auto"
            )
        return self
