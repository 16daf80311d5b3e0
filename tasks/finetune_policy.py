"""Supervised fine-tuning (SFT): the model of the spec, trained on examples before PPO begins."""

from __future__ import annotations

from ppo_core.records import FinetunePolicyJob
from tasks.reports.loss_curve import LiveCurve
from tasks.stages.context import RunContext
from tasks.stages.jobs import StageResult
from tasks.stages.references import DatasetRef, ModelRef
from tasks.stages.sharded_sampling import prepare_sampling
from tasks.stages.stage import StageSpec, job_of, run_cached, stage
from tasks.stages.table import FINETUNE_POLICY


@stage(FINETUNE_POLICY.name)
def finetune_policy(context: RunContext, dataset: DatasetRef) -> ModelRef:
    """Its loss goes to MLflow while it trains. For specs with an `sft` section."""
    spec = context.spec
    assert spec.sft is not None
    job = FinetunePolicyJob(
        seed=spec.seed,
        model=spec.model,
        sft=spec.sft,
        training=spec.training,
        deterministic=spec.engines.deterministic,
    )
    paths = {"tokenizer": context.tokenizer(), **context.model_inputs()}
    work, curve = StageSpec(FINETUNE_POLICY, job, {"dataset": dataset}, paths), LiveCurve(context, dataset)

    def make(key: str) -> StageResult:
        prepare_sampling(context, dataset)
        return context.run_job(FINETUNE_POLICY.engine, job_of(context, work, key), curve.on_progress)

    return run_cached(context, work, make)
