"""Whether engines can work with a model, found out without its weights: by its configuration and its files' headers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_core.algorithms.registry import algorithm_of
from ppo_core.data.batches import MICROBATCH_TOKENS
from ppo_core.data.tokenization import check_config_keys, context_length, model_config
from ppo_core.engines.gpu_memory import check_gpu_memory, check_main_memory
from ppo_core.engines.memory_plan import MemoryPlan
from ppo_core.engines.rollout_limits import (
    GIB,
    GPU_BLOCK,
    Attention,
    Dtype,
    attention_of,
    check_cache,
    check_heads,
    check_memory,
    machine_memory_gib,
    sampling_dtype,
)
from ppo_core.engines.vllm_source import check_architecture
from ppo_core.models.architectures import require_causal
from ppo_core.models.critic_start import critic_from, empty_origin, require_tokens
from ppo_core.models.loading import empty_policy, load_policy
from ppo_core.models.lora import target_layers
from ppo_core.models.packing import can_pack
from ppo_core.models.weight_files import tensor_shapes, weight_files
from ppo_core.records import CheckRunJob, InputError
from ppo_core.spec import ModelSpec
from ppo_core.spec.reward.kinds import ModelRewardSpec

ROOMY = 0.8
"""Where so much of a GPU holds both engines at once they need no turns; the rest is for what is not known."""
LARGEST_TRIAL = 4 << 30
"""Bytes of weights that a check may load, where their names alone do not say that they fit."""


def check_model(
    config: Any,
    folder: Path | None,
    job: CheckRunJob,
    *,
    tokens: int,
    trust_remote_code: bool,
    rewards: Sequence[tuple[ModelRewardSpec, Path]] = (),
    critic: tuple[Path, Any] | None = None,
) -> dict[str, Any]:
    """Facts of the model. Raises InputError where the training engine or the rollout engine would refuse it.

    `tokens` are those of the longest prompt plus the response; without a `folder` the model is made of `config`.
    `rewards` are reward models with their folders, `critic` is the folder that one begins as, with the run's tokenizer.
    """
    spec = job.dataset.model
    if job.new:
        refuse_in_new_runs(config, spec, folder)
    refuse_untrainable(config, str(folder or "model.config"))
    model = empty_policy(config, str(folder or spec.config), trust_remote_code=trust_remote_code)
    if spec.lora is not None:
        target_layers(model, spec.lora)
    attention, ranks, dtype = attention_of(config), job.engines.tensor_parallel_size, dtype_of_sampler(config, job)
    if job.samples:
        check_architecture(model)
    if attention is not None and job.samples:
        check_heads(attention, ranks=ranks, gpu=job.gpu is not False)
    if folder is not None:
        require_causal(config, str(folder))
        check_weights(model, folder, spec, trust_remote_code=trust_remote_code)
    of_critic, recomputes = None, bool(model.supports_gradient_checkpointing)
    if critic is not None:
        beside = _check_critic(*critic, spec, tokens=tokens, trust_remote_code=trust_remote_code)
        of_critic = sum(parameter.numel() for parameter in beside.base_model.parameters())
        recomputes = recomputes and bool(beside.supports_gradient_checkpointing)
    facts: dict[str, Any] = {
        "model_type": config.model_type,
        "parameters": sum(value.numel() for value in model.parameters()),
        "recomputes": recomputes,
        "short_rewards": _short_rewards(rewards, tokens, trust_remote_code=trust_remote_code),
    }
    plan = memory_plan(model, attention, job, dtype=dtype, longest=tokens, rewards=rewards, critic=of_critic)
    if plan is not None and job.gpu_gib is not None:
        facts["gpu_memory"] = {"needed_gib": check_gpu_memory(plan, job.gpu_gib), "gpu_gib": job.gpu_gib}
        check_main_memory(plan, machine_memory_gib())
        roomy = replace(plan, sharing="same").needed_gib() < ROOMY * job.gpu_gib
        facts["gpu_memory"]["fits_at_once"] = plan.sharing == "turns" and roomy
    if job.gpu is False:
        check_memory(job.engines.kv_cache_gib, machine_memory_gib())
    if attention is None or job.gpu is None:
        return {**facts, "sequences": None}
    sequences = check_cache(
        attention,
        tokens=tokens,
        kv_cache_gib=job.engines.kv_cache_gib,
        dtype=dtype,
        ranks=ranks,
        gpu=job.gpu,
    )
    return {**facts, "sequences": sequences}


def check_weights(model: Any, folder: Path, spec: ModelSpec, *, trust_remote_code: bool) -> None:
    """Raise what loading the weights of the causal LM `model` from a folder would; they are loaded where that is not
    known by their names."""
    if not fits(model, tensor_shapes(folder)) and _size(folder) <= LARGEST_TRIAL:
        load_policy(folder, dtype=spec.dtype, trust_remote_code=trust_remote_code)


def dtype_of_sampler(config: Any, job: CheckRunJob) -> Dtype:
    """What vLLM will compute in: on GPUs, which this process need not see, what the job says, known as it is there."""
    weights, wanted = job.dataset.model.dtype, job.sampler_dtype
    if job.gpu:
        return "float32" if (weights, wanted) == ("float32", "float32") else "bfloat16"
    return sampling_dtype(config, weights, wanted)


def memory_plan(
    model: Any,
    attention: Attention | None,
    job: CheckRunJob,
    *,
    dtype: Dtype,
    longest: int,
    rewards: Sequence[tuple[ModelRewardSpec, Path]] = (),
    critic: int | None = None,
) -> MemoryPlan | None:
    """What the run asks of a GPU; None for a flow or a model of which that is not known. `dtype` is the sampler's,
    `critic` counts the parameters of one that begins as another model."""
    learner, engines = job.learner, job.engines
    if learner is None or attention is None:
        return None
    spec, training = learner.model, learner.training
    parameters = sum(value.numel() for value in model.parameters())
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    head = output.weight.numel() if output is not None and output.weight is not embedding.weight else 0
    ranks, trained = engines.tensor_parallel_size, parameters
    least_cache = attention.cache_bytes(longest, dtype=dtype, ranks=ranks, block=GPU_BLOCK) / GIB
    if spec.lora is not None:  # A and B of each layer
        sides = [
            side for layer in target_layers(model, spec.lora).values() for side in layer.get_parameter("weight").shape
        ]
        trained = spec.lora.rank * sum(sides)
    return MemoryPlan(
        parameters=parameters,
        trained=trained,
        head=head,
        networks=len(algorithm_of(learner.algorithm).networks),
        references=int(spec.lora is None and not engines.offload_reference),
        layers=attention.layers,
        hidden=model.config.get_text_config().hidden_size,
        tokens=training.microbatch_tokens or max(MICROBATCH_TOKENS, longest),
        longest=longest,
        packs=can_pack(model.config),
        dtype=spec.dtype,
        sampler_dtype=dtype,
        products_in_bf16=training.compute_dtype != "float32",
        recompute=training.activation_checkpointing,
        zero_stage=training.zero_stage,
        ranks=training.num_ranks,
        kv_cache_gib=engines.kv_cache_gib,
        least_cache_gib=least_cache,
        tensor_parallel_size=ranks,
        sharing=job.sharing,
        fixed=frozenset(job.fixed),
        reward_gib=rewards_gib(rewards, on_each=True),
        reward_total_gib=rewards_gib(rewards),
        reward_ranks=max((spec.num_ranks for spec, _ in rewards if spec.device != "cpu"), default=1),
        gpus=job.gpus,
        vocabulary=len(embedding.weight),
        critic=critic,
    )


def rewards_gib(rewards: Sequence[tuple[ModelRewardSpec, Path]], *, on_each: bool = False) -> float:
    """GiB of reward models' weights on GPUs, by the headers of their files; `on_each`: on each that they use."""
    size = {"bfloat16": 2, "float32": 4}
    return sum(
        size[spec.dtype]
        * sum(map(math.prod, tensor_shapes(folder).values()))
        / (spec.num_ranks if on_each else 1)
        / GIB
        for spec, folder in rewards
        if spec.device != "cpu"
    )


def _short_rewards(
    rewards: Sequence[tuple[ModelRewardSpec, Path]], tokens: int, *, trust_remote_code: bool
) -> dict[str, int]:
    """The context of each reward model that is shorter than so many tokens, by the reward's name."""
    contexts = {
        spec.component: context_length(model_config(str(folder), None, trust_remote_code=trust_remote_code))
        for spec, folder in rewards
    }
    return {name: context for name, context in contexts.items() if context is not None and context < tokens}


def _check_critic(folder: Path, tokenizer: Any, spec: ModelSpec, *, tokens: int, trust_remote_code: bool) -> Any:
    """What the critic begins as, without weights. Refuses what `critic_from` and the critic's first pass would."""
    config = model_config(str(folder), None, trust_remote_code=trust_remote_code)
    refuse_untrainable(config, str(folder))
    model = empty_origin(config, folder, trust_remote_code=trust_remote_code)
    require_tokens(folder, tokenizer, trust_remote_code=trust_remote_code)
    limit = context_length(config)
    if limit is not None and limit < tokens:
        raise InputError(
            f"model.critic: {folder} reads {limit} tokens, and the longest prompt and response have {tokens}: lower "
            "rollout.max_response_tokens, or use a model with a longer context"
        )
    if spec.lora is not None:
        target_layers(model.base_model, spec.lora)
    if not fits(model, tensor_shapes(folder)) and _size(folder) <= LARGEST_TRIAL:
        critic_from(folder, dtype=spec.dtype, trust_remote_code=trust_remote_code)
    return model


def refuse_untrainable(config: Any, name: str) -> None:
    """Raise InputError for weights that are quantised, and for RWKV, whose passes change them (`rescale_every`)."""
    if config.model_type == "rwkv":
        raise InputError(f"{name} is of type rwkv, whose weights change with every pass: use another model")
    if config.to_dict().get("quantization_config") or config.get_text_config().to_dict().get("quantization_config"):
        raise InputError(
            f"{name} is quantised (quantization_config), but training needs unquantised weights: use the model that it "
            "was made from, in float32 or bfloat16"
        )


def refuse_in_new_runs(config: Any, spec: ModelSpec, folder: Path | None) -> None:
    """Raise InputError for misspelt keys of `model.config`, and for experts whose router has a balancing loss: no
    objective here has it as a part. A run that began with either goes on."""
    if spec.config is not None:
        check_config_keys(spec.config)
    if config.get_text_config().to_dict().get("output_router_logits"):
        place = "model.config" if folder is None else f"the config.json of a copy of {folder}"
        raise InputError(
            "output_router_logits=true adds a balancing loss (router_aux_loss_coef), which no objective has as a part: "
            f"set it to false in {place}"
        )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def fits(model: Any, found: dict[str, tuple[int, ...]]) -> bool:
    """Whether every parameter is there under its own name, in its own shape; one that is tied only once.

    transformers can also read older names, which it alone knows.
    """
    prefix = f"{model.base_model_prefix}."
    there: set[int] = set()
    wanted: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted.add(id(parameter))
        shape = found.get(name, found.get(name.removeprefix(prefix)))
        if shape is not None and shape != tuple(parameter.shape):
            return False
        if shape is not None:
            there.add(id(parameter))
    return wanted == there
