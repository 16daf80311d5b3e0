"""Checkpoint 0: the model of the spec, trained on examples first where the spec has an SFT section."""

from __future__ import annotations

from functools import partial

from ppo_core.records import StartPolicyJob
from tasks.reports.loss_curve import LiveCurve
from tasks.stages.context import RunContext
from tasks.stages.model_card import describe_policy
from tasks.stages.references import CheckpointRef, DatasetRef
from tasks.stages.stage import StageSpec, job_of, run_cached, stage
from tasks.stages.table import START_POLICY


@stage(START_POLICY.name)
def start_policy(context: RunContext, dataset: DatasetRef) -> CheckpointRef:
    """Also the reference of the whole run."""
    spec = context.spec
    job = StartPolicyJob(
        seed=spec.seed,
        model=spec.model,
        sft=spec.sft,
        training=spec.training,
        deterministic=spec.engines.deterministic,
    )
    paths = {"tokenizer": context.tokenizer(), **context.model_inputs()}
    finish = partial(describe_policy, context_length=dataset.context_length)
    work, curve = StageSpec(START_POLICY, job, {"dataset": dataset}, paths, finish), LiveCurve(context, dataset)
    return run_cached(
        context,
        work,
        make=lambda key: context.run_job(START_POLICY.engine, job_of(context, work, key), curve.on_progress),
    )
