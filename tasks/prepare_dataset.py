"""The user's rows become checked, tokenized prompts."""

from __future__ import annotations

from tasks.stages.context import RunContext
from tasks.stages.dataset_job import dataset_job, same_data
from tasks.stages.references import DatasetRef
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import PREPARE_DATASET


@stage(PREPARE_DATASET.name)
def prepare_dataset(context: RunContext) -> DatasetRef:
    """Once per run, before anything else is done: bad input ends the run here."""
    spec = context.spec
    job = dataset_job(spec)
    paths = {
        "sources": context.sources(*spec.data, *spec.reward.code),
        "tokenizer": context.tokenizer(),
        **context.model_inputs(),
        **context.hub_inputs(*spec.data, *spec.reward.folders),
    }
    same = same_data(spec.data, context.path, context.source_digests)
    return run_cached(context, StageSpec(PREPARE_DATASET, job, paths=paths, finish=same))
