"""A policy learns from preferences: direct preference optimisation (DPO)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.mlflow.model_files import write_mlmodel
from ppo_core.records import TrainDpoJob
from tasks.preferences.context import DpoContext
from tasks.preferences.stages import POLICY, TRAIN_DPO, DpoPolicyRef, PreferencesRef
from tasks.reports.loss_curve import LiveCurve
from tasks.stages.references import CheckpointRef
from tasks.stages.stage import StageSpec, job_of, key_of, run_cached, stage

LOSS_CURVE = "loss"


@stage(TRAIN_DPO.name)
def train_dpo(context: DpoContext, dataset: PreferencesRef, checkpoint: CheckpointRef) -> DpoPolicyRef:
    """Its reference is the checkpoint that it starts from. Its loss goes to MLflow while it trains."""
    spec = context.spec
    job = TrainDpoJob(
        seed=spec.seed,
        dtype=spec.model.dtype,
        dpo=spec.dpo,
        lora=spec.model.lora,
        training=spec.training,
        deterministic=spec.engines.deterministic,
    )
    work = StageSpec(TRAIN_DPO, job, {"dataset": dataset, "checkpoint": checkpoint})
    curve, seed = LiveCurve(context, dataset, LOSS_CURVE), key_of(context, work)
    work = replace(work, finish=partial(describe, seed=seed, context_length=dataset.context_length))
    return run_cached(
        context,
        work,
        make=lambda key: context.run_job(TRAIN_DPO.engine, job_of(context, work, key), curve.on_progress),
    )


def describe(artifact: Path, *, seed: str, context_length: int | None) -> None:
    """Write MLflow's files beside the policy; the same bytes for the same derivation."""
    write_mlmodel(artifact / POLICY, digest_seed=seed, context_length=context_length)
