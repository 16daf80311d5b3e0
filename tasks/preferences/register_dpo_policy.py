"""A policy that was trained on preferences becomes a version of an MLflow model, where it lies, and a folder."""

from __future__ import annotations

import json
from pathlib import Path

from infra.artifacts.export import export_part
from infra.mlflow.registry import DIGEST_TAG, Registered, register
from tasks.policies.policy import CHECKPOINT_TAG, RUN_TAG
from tasks.preferences.context import DpoContext
from tasks.preferences.stages import POLICY, DpoPolicyRef, PreferencesRef
from tasks.stages.references import EvaluationRef
from tasks.stages.stage import completed, stage


@stage("register_dpo_policy", retries=1)
def register_dpo_policy(
    context: DpoContext, preferences: PreferencesRef, policy: DpoPolicyRef, evaluation: EvaluationRef | None
) -> Registered:
    """The same policy is registered once."""
    spec = context.spec
    tags = {
        DIGEST_TAG: policy.digest,
        RUN_TAG: context.run,
        "ppoflow.preferences_digest": preferences.digest,
        CHECKPOINT_TAG: json.dumps(policy.bare().model_dump()),  # where `ppoflow sample` finds it
    }
    if evaluation is not None:
        measured = {"metrics": evaluation.metrics, **evaluation.bare().model_dump()}
        tags["ppoflow.evaluation"] = json.dumps(measured)
    context.tracker.open()  # a server that cannot read our store gets the files through this MLflow run
    registered = register(
        context.settings.tracking_uri,
        name=spec.model_name,
        source=f"{context.store.location(policy.bare())}/{POLICY}",
        tags=tags,
        aliases=[spec.registry.alias] if spec.registry.alias else [],
        description=f"Policy of the DPO run {context.run}; {policy.in_words()}.",
        run_id=context.tracker.run_id,
        model_description=f"Policies trained on preferences (DPO) by runs of the spec `{spec.name}`.\n\n"
        f'- ask it: `ppoflow sample models:/{spec.model_name}/1 "…"`',
    )
    return completed(registered, f"models:/{registered.name}/{registered.version} is the policy of {context.run}")


def export_dpo_policy(context: DpoContext, policy: DpoPolicyRef) -> Path:
    """Put a copy into the run's own folder, with a manifest that proves it."""
    target, ref = context.settings.dpo_policy_folder(context.run), policy.bare()
    export_part(context.store.fetch(ref), context.store.manifest(ref), ref, POLICY, target)
    return target
