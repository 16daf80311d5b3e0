"""vLLM as the rollout engine starts it: its samples depend on nothing but the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppo_core.engines.rollout_limits import GIB, check_limits, engines_refusal, sampling_dtype
from ppo_core.engines.vllm_worker import WeightSwap
from ppo_core.processes.lean_imports import absent, only_for_gpus
from ppo_core.processes.turns import SleepingModel
from ppo_core.records import SamplingJob

SPARED = ("scipy.signal", "ray", *only_for_gpus())
"""What vLLM can do without: audio, its own clusters and, where torch has no GPUs, kernels; a second of each start."""


def start_vllm(
    policy: Path, spec: SamplingJob, context: int, *, trust_remote_code: bool, takes_turns: bool
) -> tuple[Any, SleepingModel]:
    """A vLLM engine around the policy; `context` tokens are the longest prompt plus response.

    Raises InputError for a model or a cache that vLLM can never work with here.
    """
    import torch
    from vllm import LLM

    from ppo_core.data.tokenization import model_config
    from ppo_core.processes.vector_math import prepare_vector_math

    prepare_vector_math()
    on_gpu = torch.cuda.is_available()
    config = model_config(str(policy), None, trust_remote_code=trust_remote_code)
    dtype = sampling_dtype(config, spec.model.dtype, spec.compute_dtype)
    check_limits(config, spec, context, dtype=dtype, gpu=on_gpu)
    options: dict[str, Any] = {}
    if on_gpu:
        # vLLM refuses to start where less is free than its share of the card, and the training engine has some already.
        # Its own process takes some before it looks; beside kv_cache_memory_bytes the share sizes nothing.
        free, total = torch.cuda.mem_get_info()
        options = {"gpu_memory_utilization": 0.8 * free / total, "enable_sleep_mode": takes_turns}
    try:
        with absent(*SPARED):
            llm = LLM(
                model=str(policy),
                dtype=dtype,
                load_format="safetensors",
                max_model_len=context,
                skip_tokenizer_init=not spec.stop,  # vLLM looks for these in the text
                trust_remote_code=trust_remote_code,
                enforce_eager=not on_gpu,
                distributed_executor_backend="mp" if spec.tensor_parallel_size > 1 else "uni",
                tensor_parallel_size=spec.tensor_parallel_size,
                kv_cache_memory_bytes=int(spec.kv_cache_gib * GIB),
                logprobs_mode="processed_logprobs",
                worker_extension_cls=f"{WeightSwap.__module__}.{WeightSwap.__qualname__}",
                generation_config="vllm",
                disable_log_stats=True,
                seed=0,
                **options,
            )
    except ValueError as error:
        refusal = engines_refusal(str(error), kv_cache_gib=spec.kv_cache_gib, tokens=context)
        if refusal is None:
            raise
        raise refusal from None
    return llm, SleepingModel(llm, on_gpu=on_gpu)
