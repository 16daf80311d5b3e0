"""Checkpoint 0: the model of the spec, trained on examples first where the spec has an SFT section."""

from __future__ import annotations

from functools import partial

from ppo_core.records import StartPolicyJob
from tasks.reports.loss_curve import LiveCurve
from tasks.stages.context import Workbench
from tasks.stages.model_card import describe_policy
from tasks.stages.references import CheckpointRef, DatasetRef
from tasks.stages.stage import Work, order_of, perform, stage


@stage("start_policy")
def start_policy(bench: Workbench, dataset: DatasetRef) -> CheckpointRef:
    """Also the reference of the whole run."""
    spec = bench.spec
    job = StartPolicyJob(
        seed=spec.seed,
        model=spec.model,
        sft=spec.sft,
        training=spec.training,
        deterministic=spec.engines.deterministic,
    )
    paths = {"tokenizer": bench.tokenizer(), **bench.model_inputs()}
    finish = partial(describe_policy, context_length=dataset.context_length)
    work = Work(
        "start_policy",
        "checkpoint",
        "training",
        "start_policy",
        job,
        {"dataset": dataset},
        paths,
        CheckpointRef,
        finish,
    )
    curve = LiveCurve(bench, dataset)
    return perform(bench, work, make=lambda key: bench.fulfil(work.engine, order_of(bench, work, key), curve.watch))
