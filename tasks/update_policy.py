"""The policy, and what the algorithm trains beside it, learn from the experience."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from infra.artifacts import ArtifactRef
from ppo_core.records import UpdatePolicyJob
from tasks.stages.context import RunContext
from tasks.stages.model_card import describe_policy
from tasks.stages.references import CheckpointRef, DatasetRef, ExperienceRef, StageRef
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import UPDATE_POLICY


@stage(UPDATE_POLICY.name)
def update_policy(
    context: RunContext,
    checkpoint: CheckpointRef,
    reference: CheckpointRef,
    experience: ExperienceRef,
    dataset: DatasetRef,
    *,
    iteration: int,
    carried: Mapping[str, Mapping[str, float]],
    rate_factor: float,
    full: bool,
    restoration: Mapping[str, ArtifactRef],
) -> CheckpointRef:
    """The next checkpoint. `iteration` counts from 1, schedules from 0. `carried`, `restoration`: `IterationRecord`."""
    spec = context.spec
    job = UpdatePolicyJob(
        seed=spec.seed,
        iteration=iteration - 1,
        model=spec.model,
        algorithm=spec.algorithm.continued(carried.get(UPDATE_POLICY.name, {})),
        update=spec.update,
        whitening=spec.advantages.minibatch_whitening,
        training=spec.training,
        max_response_tokens=spec.rollout.max_response_tokens if spec.update.aggregation == "fixed_length" else None,
        temperature=spec.rollout.temperature,
        rate_factor=rate_factor,
        max_skipped_steps=spec.guards.max_skipped_steps,
        full=full,
        reference=spec.advantages.reference,
        deterministic=spec.engines.deterministic,
    )
    inputs: dict[str, StageRef] = {"checkpoint": checkpoint, "experience": experience}
    # Its weights, which no checkpoint after it has without adapters in them; or what it says of every token.
    if spec.model.lora is not None or spec.update.exact_kl_loss:
        inputs["reference"] = reference
    finish = partial(describe_policy, context_length=dataset.context_length)
    return run_cached(context, StageSpec(UPDATE_POLICY, job, inputs, finish=finish, restoration=restoration))
