"""The user's preferences become checked, tokenized rankings."""

from __future__ import annotations

from tasks.preferences.context import PreferenceContext, preferences_job
from tasks.preferences.stages import PREPARE_PREFERENCES, PreferencesRef
from tasks.stages.dataset_job import same_data
from tasks.stages.stage import StageSpec, run_cached, stage


@stage(PREPARE_PREFERENCES.name)
def prepare_preferences(context: PreferenceContext) -> PreferencesRef:
    """Before anything else is done with them: bad input ends the run here."""
    job = preferences_job(context.spec)
    data = job.dataset.paths
    paths = {
        "sources": context.sources(*data),
        "tokenizer": context.tokenizer(),
        **context.model_inputs(),
        **context.hub_inputs(*data),
    }
    same = same_data(data, context.path, context.source_digests)
    return run_cached(context, StageSpec(PREPARE_PREFERENCES, job, paths=paths, finish=same))
