"""Rollouts and scores become experience: logprobs, values, per-token rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping

from infra.artifacts import ArtifactRef
from ppo_core.records import ComputeAdvantagesJob, OptimizerSettings
from ppo_core.spec import FixedKl
from tasks.stages.context import RunContext
from tasks.stages.references import CheckpointRef, ExperienceRef, RolloutsRef, ScoresRef
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import COMPUTE_ADVANTAGES


@stage(COMPUTE_ADVANTAGES.name)
def compute_advantages(
    context: RunContext,
    checkpoint: CheckpointRef,
    reference: CheckpointRef,
    rollouts: RolloutsRef,
    scores: ScoresRef,
    *,
    iteration: int,
    kl_coef: float,
    carried: Mapping[str, Mapping[str, float]],
    restoration: Mapping[str, ArtifactRef],
) -> ExperienceRef:
    """What the update learns from, and the next KL coefficient. `carried`, `restoration`: see `IterationRecord`."""
    spec = context.spec
    kl, warmup, decay = spec.advantages.kl, spec.update.critic_warmup_iterations, spec.update.decay_iterations
    scheduled = isinstance(kl, FixedKl) and kl.schedule != "constant"
    before = iteration - 1 - warmup  # iterations that trained the policy; negative as long as the critic warms up
    job = ComputeAdvantagesJob(
        model=spec.model,
        temperature=spec.rollout.temperature,
        algorithm=spec.algorithm,
        advantages=spec.advantages,
        max_response_tokens=spec.rollout.max_response_tokens,
        training=spec.training,
        optimizer=OptimizerSettings.of(spec.update),
        kl_coef=kl_coef,
        iteration=max(before, 0) if scheduled else 0,
        decay_iterations=decay - warmup if scheduled and decay is not None else None,
        trains_policy=before >= 0,
        carried=carried.get(COMPUTE_ADVANTAGES.name, {}),
        deterministic=spec.engines.deterministic,
    )
    inputs = {"checkpoint": checkpoint, "reference": reference, "rollouts": rollouts, "scores": scores}
    return run_cached(context, StageSpec(COMPUTE_ADVANTAGES, job, inputs, restoration=restoration))
