"""A causal LM gets a new head and learns which of two responses is better."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.mlflow.model_files import SCORES, write_mlmodel
from ppo_core.records import TrainRewardModelJob
from tasks.preferences.context import RewardModelContext
from tasks.preferences.stages import MODEL, TRAIN_REWARD_MODEL, PreferencesRef, RewardModelRef
from tasks.reports.loss_curve import LiveCurve
from tasks.stages.stage import StageSpec, job_of, key_of, run_cached, stage

LOSS_CURVE = "reward_model/loss_curve"


@stage(TRAIN_REWARD_MODEL.name)
def train_reward_model(context: RewardModelContext, dataset: PreferencesRef) -> RewardModelRef:
    """Its loss goes to MLflow while it trains."""
    spec = context.spec
    job = TrainRewardModelJob(
        seed=spec.seed,
        model=spec.model,
        fit=spec.fit,
        training=spec.training,
        deterministic=spec.engines.deterministic,
    )
    paths = {"tokenizer": context.tokenizer(), **context.model_inputs()}
    work, curve = (
        StageSpec(TRAIN_REWARD_MODEL, job, {"dataset": dataset}, paths),
        LiveCurve(context, dataset, LOSS_CURVE),
    )
    work = replace(work, finish=partial(describe_reward_model, seed=key_of(context, work)))
    return run_cached(
        context,
        work,
        make=lambda key: context.run_job(TRAIN_REWARD_MODEL.engine, job_of(context, work, key), curve.on_progress),
    )


def describe_reward_model(artifact: Path, *, seed: str) -> None:
    """Write MLflow's files into `model/` of a reward model's artifact."""
    write_mlmodel(artifact / MODEL, digest_seed=seed, task=SCORES)
