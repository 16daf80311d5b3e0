"""The user's preferences become checked, tokenized rankings."""

from __future__ import annotations

from ppo_core.records import PreparePreferencesJob
from tasks.preferences.context import RewardModelContext
from tasks.preferences.stages import PREPARE_PREFERENCES, PreferencesRef
from tasks.stages.stage import StageSpec, run_cached, stage


@stage(PREPARE_PREFERENCES.name)
def prepare_preferences(context: RewardModelContext) -> PreferencesRef:
    """Before anything else is done: bad input ends the run here."""
    spec = context.spec
    job = PreparePreferencesJob(dataset=spec.dataset, model=spec.model)
    paths = {"sources": context.sources(*spec.data), "tokenizer": context.tokenizer(), **context.model_inputs()}
    return run_cached(context, StageSpec(PREPARE_PREFERENCES, job, paths=paths))
