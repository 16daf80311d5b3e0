"""Held-out prompts, answered by sampling and greedily, and scored."""

from __future__ import annotations

import time
from dataclasses import replace

from prefect.client.schemas.objects import State

from ppo_core.records import EvaluateJob, GenerateJob
from tasks.stages.context import RunContext
from tasks.stages.references import CheckpointRef, DatasetRef, EvaluationRef, RolloutsRef, StageRef
from tasks.stages.sharded_sampling import sample_responses
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import EVALUATE_POLICY, GENERATE_ROLLOUTS

SAMPLE_ANSWERS = replace(GENERATE_ROLLOUTS, name=EVALUATE_POLICY.name)
"""Rollouts that are a part of the evaluation."""


@stage(EVALUATE_POLICY.name)
def evaluate_policy(context: RunContext, checkpoint: CheckpointRef, dataset: DatasetRef) -> EvaluationRef:
    """The same prompts and seeds for every checkpoint, so that evaluations compare."""
    spec, begun = context.spec, time.perf_counter()
    inputs: dict[str, StageRef] = {
        "sampled": _answers(context, checkpoint, dataset, spec.rollout.temperature),
        "greedy": _answers(context, checkpoint, dataset, 0.0),
        "dataset": dataset,
    }
    job = EvaluateJob(
        checkpoint=checkpoint.digest,
        reward=spec.reward,
        answer_column=spec.dataset.answer_column,
        pass_score=spec.evaluation.pass_score,
    )
    work = StageSpec(EVALUATE_POLICY, job, inputs, context.rewards())
    return run_cached(context, work, begun=begun)


def _answers(context: RunContext, checkpoint: CheckpointRef, dataset: DatasetRef, temperature: float) -> RolloutsRef:
    spec = context.spec
    job = GenerateJob(
        seed=spec.seed,
        stream="evaluation",
        split="eval",
        position=0,
        num_prompts=spec.evaluation.num_prompts,
        shuffle=False,
        samples_per_prompt=1,
        max_response_tokens=spec.rollout.max_response_tokens,
        stop=spec.rollout.stop,
        stop_token_ids=spec.rollout.stop_token_ids,
        temperature=temperature,
        model=spec.model,
        compute_dtype=spec.rollout.compute_dtype(spec.training),
        kv_cache_gib=spec.engines.kv_cache_gib,
        tensor_parallel_size=spec.engines.tensor_parallel_size,
        deterministic=spec.engines.deterministic,
        weights=spec.evaluation.weights,
    )
    outcome = sample_responses(context, SAMPLE_ANSWERS, job, {"checkpoint": checkpoint, "dataset": dataset})
    return outcome.result() if isinstance(outcome, State) else outcome
