"""Checkpoint 0: the model of the spec, or the one that was fine-tuned from it, with a critic."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from infra.artifacts.export import export_part
from ppo_core.records import StartPolicyJob
from tasks.stages.context import RunContext
from tasks.stages.model_card import describe_policy
from tasks.stages.references import CheckpointRef, DatasetRef, ModelRef, StageRef
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import START_POLICY


@stage(START_POLICY.name)
def start_policy(context: RunContext, dataset: DatasetRef, model: ModelRef | None) -> CheckpointRef:
    """Also the reference of the whole run."""
    spec = context.spec
    job = StartPolicyJob(seed=spec.seed, model=spec.model, algorithm=spec.algorithm, ema=spec.averages)
    inputs: dict[str, StageRef] = {"dataset": dataset}
    paths = {"tokenizer": context.tokenizer()}
    if model is None:
        paths |= context.model_inputs()
    else:
        inputs["model"] = model
    if spec.critic is not None:
        paths["critic"] = context.folder_input(spec.critic)
    finish = partial(describe_policy, context_length=dataset.context_length)
    return run_cached(context, StageSpec(START_POLICY, job, inputs, paths, finish))


def export_start(context: RunContext, checkpoint: CheckpointRef) -> Path:
    """Put a copy of the policy that PPO starts from into the run's own folder, with a manifest that proves it."""
    target, ref = context.settings.start_policy_folder(context.run), checkpoint.bare()
    export_part(context.store.fetch(ref), context.store.manifest(ref), ref, "policy", target)
    return target
