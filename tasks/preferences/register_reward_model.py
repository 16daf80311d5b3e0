"""The reward model becomes a version of an MLflow model, where it lies, and a folder for specs to name."""

from __future__ import annotations

import json
from pathlib import Path

from infra.artifacts import ArtifactRef, ArtifactStore
from infra.artifacts.export import export_part, exported_from
from infra.backend import open_records
from infra.mlflow.registry import DIGEST_TAG, Registered, register
from ppo_core.records import InputError
from tasks.policies.policy import REWARD_MODEL_TAG
from tasks.preferences.context import RewardModelContext
from tasks.preferences.stages import MODEL, PreferencesRef, RewardEvaluationRef, RewardModelRef
from tasks.runs.run_state import recorded_spec
from tasks.stages.stage import completed, stage


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
        REWARD_MODEL_TAG: json.dumps(model.bare().model_dump()),
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


def export_reward_model(store: ArtifactStore, model: ArtifactRef, run: str, target: Path) -> Path:
    """Put a copy into the run's own folder `target`, with a manifest that proves it.

    Raises InputError where the training of the same name has begun with another reward model there.
    """
    before = exported_from(target)
    if before is not None and before.digest != model.digest:
        begun = recorded_spec(open_records(store.root, run))
        if begun is not None and str(target) in begun.model_folders:
            raise InputError(
                f"run {run} has begun with the reward model {before.digest[:12]}, and this would be another one, "
                f"{model.digest[:12]}: choose another --run name, or restore the settings and data of the first"
            )
    export_part(store.fetch(model), store.manifest(model), model, MODEL, target)
    return target
