"""The user's rows become checked, tokenized prompts."""

from __future__ import annotations

from ppo_core.records import PrepareDatasetJob
from tasks.references import DatasetRef
from tasks.stage import Work, perform, stage
from tasks.workbench import Workbench


@stage("prepare_dataset")
def prepare_dataset(bench: Workbench) -> DatasetRef:
    """Once per run, before anything else is done: bad input ends the run here."""
    spec = bench.spec
    evaluates = spec.dataset.evaluation is not None
    job = PrepareDatasetJob(
        dataset=spec.dataset,
        model=spec.model,
        sft_data=spec.sft.data if spec.sft else None,
        max_response_tokens=spec.rollout.max_response_tokens,
        num_eval_prompts=spec.evaluation.num_prompts if evaluates else 0,
        reward=spec.reward,
    )
    data = (spec.dataset.train, spec.dataset.evaluation, job.sft_data)
    paths = {
        "sources": bench.sources(*data, *spec.reward.weights),
        "tokenizer": bench.tokenizer(),
        **bench.model_inputs(),
    }
    return perform(
        bench, Work("prepare_dataset", "dataset", "scoring", "prepare_dataset", job, paths=paths, made=DatasetRef)
    )
