"""The user's rows become checked, tokenized prompts."""

from __future__ import annotations

from tasks.stages.context import Workbench
from tasks.stages.dataset_job import dataset_job
from tasks.stages.references import DatasetRef
from tasks.stages.stage import Work, perform, stage


@stage("prepare_dataset")
def prepare_dataset(bench: Workbench) -> DatasetRef:
    """Once per run, before anything else is done: bad input ends the run here."""
    spec = bench.spec
    job = dataset_job(spec)
    data = (spec.dataset.train, spec.dataset.evaluation, job.sft_data)
    paths = {
        "sources": bench.sources(*data, *spec.reward.weights),
        "tokenizer": bench.tokenizer(),
        **bench.model_inputs(),
    }
    return perform(
        bench, Work("prepare_dataset", "dataset", "scoring", "prepare_dataset", job, paths=paths, made=DatasetRef)
    )
