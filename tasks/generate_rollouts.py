"""The policy answers prompts: vLLM samples responses."""

from __future__ import annotations

from ppo_core.records import GenerateJob
from tasks.stages.context import RunContext
from tasks.stages.dynamic_sampling import sample_until_signal
from tasks.stages.references import CheckpointRef, DatasetRef, RolloutsRef
from tasks.stages.sharded_sampling import sample_responses
from tasks.stages.stage import stage
from tasks.stages.table import GENERATE_ROLLOUTS


@stage(GENERATE_ROLLOUTS.name)
def generate_rollouts(
    context: RunContext,
    checkpoint: CheckpointRef,
    dataset: DatasetRef,
    *,
    iteration: int,
    position: int,
    attempt: int = 0,
) -> RolloutsRef:
    """One iteration's responses; `position` is the data cursor. Another `attempt` draws other samples."""
    spec = context.spec
    job = GenerateJob(
        seed=spec.seed,
        stream=f"{iteration}, attempt {attempt}" if attempt else iteration,
        split="train",
        position=position,
        num_prompts=spec.rollout.prompts_per_iteration,
        shuffle=spec.dataset.shuffle,
        samples_per_prompt=spec.rollout.samples_per_prompt,
        max_response_tokens=spec.rollout.max_response_tokens,
        stop=spec.rollout.stop,
        stop_token_ids=spec.rollout.stop_token_ids,
        temperature=spec.rollout.temperature,
        model=spec.model,
        compute_dtype=spec.rollout.compute_dtype(spec.training),
        kv_cache_gib=spec.engines.kv_cache_gib,
        tensor_parallel_size=spec.engines.tensor_parallel_size,
        deterministic=spec.engines.deterministic,
        curriculum=spec.dataset.curriculum,
        temperature_column=spec.rollout.temperature_column,
        max_response_tokens_column=spec.rollout.max_response_tokens_column,
    )
    inputs = {"checkpoint": checkpoint, "dataset": dataset}
    dynamic = spec.rollout.dynamic_sampling
    if dynamic is not None:
        return sample_until_signal(context, job, inputs, max_batches=dynamic.max_batches)
    return sample_responses(context, GENERATE_ROLLOUTS, job, inputs, score_ahead=True)
