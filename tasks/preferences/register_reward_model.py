"""The reward model becomes a version of an MLflow model, where it lies, and a folder for specs to name."""

from __future__ import annotations

import json
from pathlib import Path

from infra.artifacts.export import export_part
from infra.mlflow.registry import DIGEST_TAG, Registered, register
from tasks.preferences.context import RewardModelContext
from tasks.preferences.stages import MODEL, PreferencesRef, RewardEvaluationRef, RewardModelRef
from tasks.stages.context import RunContext
from tasks.stages.references import StageRef
from tasks.stages.stage import completed, stage

EXPORTED = "reward-model"


@stage("register_reward_model", retries=1)
def register_reward_model(
    context: RewardModelContext, dataset: PreferencesRef, model: RewardModelRef, evaluation: RewardEvaluationRef
) -> Registered:
    """The same reward model is registered once."""
    spec = context.spec
    tags = {
        DIGEST_TAG: model.digest,
        "ppoflow.run": context.run,
        "ppoflow.dataset_digest": dataset.digest,
        "ppoflow.reward_model": json.dumps(model.bare().model_dump()),
        "ppoflow.reward_evaluation": json.dumps({"metrics": evaluation.metrics, **evaluation.bare().model_dump()}),
    }
    context.tracker.open()  # a server that cannot read our store gets the files through this MLflow run
    registered = register(
        context.settings.tracking_uri,
        name=spec.model_name,
        source=f"{context.store.location(model.bare())}/{MODEL}",
        tags=tags,
        aliases=[spec.registry.alias] if spec.registry.alias else [],
        description=f"Reward model of run {context.run}; held-out {evaluation.in_words()}.",
        run_id=context.tracker.run_id,
        model_description=f"Reward models trained by runs of the spec `{spec.name}`: sequence classifiers with one "
        "label, for the reward kind `model`.",
    )
    return completed(registered, f"models:/{registered.name}/{registered.version} is the reward model of {context.run}")


def export_reward_model(context: RewardModelContext, model: RewardModelRef) -> Path:
    """Put a copy into the run's own folder, with a manifest that proves it."""
    return export_folder(context, model, MODEL, EXPORTED)


def export_folder(context: RunContext, made: StageRef, part: str, name: str) -> Path:
    """Put a copy of a folder in an artifact into the run's own folder, under that name."""
    target, ref = context.settings.run_folder(context.run) / name, made.bare()
    export_part(context.store.fetch(ref), context.store.manifest(ref), ref, part, target)
    return target
