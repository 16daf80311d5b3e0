"""The best policy becomes a version of an MLflow model, where it lies, with its lineage."""

from __future__ import annotations

import json
from pathlib import Path

from infra.artifacts import ArtifactError
from infra.artifacts.export import export_part
from infra.mlflow.registry import DIGEST_TAG, Registered, register
from tasks.runs.fork import comparable
from tasks.runs.iteration_record import Best, IterationRecord, best_in_words, best_of, read_record
from tasks.runs.kept import REGISTERED, keep
from tasks.runs.run_state import record_at, recorded_spec, with_changes
from tasks.stages.context import RunContext
from tasks.stages.references import CheckpointRef
from tasks.stages.stage import completed, stage


@stage("register_policy", retries=1)
def register_policy(context: RunContext, record: IterationRecord, best: Best) -> Registered:
    """Register the run's best policy; the same policy of the same run is registered once."""
    spec = context.spec
    context.store.fetch(best.checkpoint.bare())  # only what is undamaged is registered
    # Before that: no retention of this run, which may go on, shall let go what a version is.
    keep(context.store.root, context.run, [best.checkpoint.bare()], REGISTERED)
    lineage = {
        DIGEST_TAG: best.checkpoint.digest,
        "ppoflow.run": context.run,
        "ppoflow.iteration": str(best.iteration),
        "ppoflow.metric": f"{best.metric}={best.value}",
        "ppoflow.spec_digest": record.spec_digest,
        "ppoflow.dataset_digest": record.dataset.digest,
        "ppoflow.checkpoint": json.dumps(best.checkpoint.bare().model_dump()),
        **evaluation_of(context, record, best),
    }
    in_words = best_in_words(best, record_at(context.records, best.iteration).metrics)
    context.tracker.open()  # a server that cannot read our store gets the files through this MLflow run
    registered = register(
        context.settings.tracking_uri,
        name=spec.model_name,
        source=f"{context.store.location(best.checkpoint.bare())}/{handed_over(context, best)}",
        tags=lineage,
        aliases=[spec.registry.alias] if spec.registry.alias else [],
        description=f"Policy of run {context.run}, iteration {best.iteration}; {in_words}.",
        run_id=context.tracker.run_id,
        model_description=model_description(context),
    )
    return completed(
        registered, f"models:/{registered.name}/{registered.version} is iteration {best.iteration} of run {context.run}"
    )


def model_description(context: RunContext) -> str:
    """What the registered model is, for its page."""
    name, metric = context.spec.model_name, context.spec.registry.metric
    return (
        f"Policies trained with PPO by runs of the spec `{context.spec.name}`: each version is the best one of a run "
        f"by `{metric}`, and its tags say of which run and iteration, and how good it is.\n\n"
        f"- where a version comes from: `ppoflow lineage models:/{name}/1`\n"
        f'- ask it: `ppoflow sample models:/{name}/1 "…"`\n'
        f"- compare it with the champion: `ppoflow promote models:/{name}/1`"
    )


def evaluation_of(context: RunContext, record: IterationRecord, best: Best) -> dict[str, str]:
    """The tag that says how good the policy was on held-out prompts; none where it was not evaluated."""
    made = record if record.iteration == best.iteration else record_at(context.records, best.iteration)
    if made.evaluation is None:
        return {}
    measured = {"metrics": made.evaluation.metrics, **made.evaluation.bare().model_dump()}
    return {"ppoflow.evaluation": json.dumps(measured)}


def usable_best(context: RunContext, record: IterationRecord) -> Best:
    """The best policy so far; where damage has taken it away, or it was chosen by another metric than the spec names
    now, the best of those that are there and were measured alike."""
    metric, records = context.spec.registry.metric, context.records
    if record.best.metric == metric and is_stored(context, record.best.checkpoint):
        return record.best
    before = (r for r in map(read_record, records.all()) if r.iteration < record.iteration)
    alike = comparable(before, recorded_spec(records) or context.spec, context.spec)
    stored = (r for r in alike if is_stored(context, r.checkpoint))
    return best_of(metric, record.metrics, record.iteration, record.checkpoint, stored)


def is_stored(context: RunContext, checkpoint: CheckpointRef) -> bool:
    """Whether the store has a checkpoint, as far as a look tells."""
    try:
        return context.store.find(checkpoint.kind, checkpoint.key) is not None
    except ArtifactError:
        return False


def handed_over(context: RunContext, best: Best) -> str:
    """The folder in the checkpoint of what was evaluated there; the policy in one that a fork has from before."""
    then = record_at(context.records, best.iteration)
    made_with = with_changes(recorded_spec(context.records) or context.spec, then.changed)
    wanted, files = made_with.evaluation.weights, context.store.manifest(best.checkpoint.bare()).files
    return wanted if any(name.startswith(f"{wanted}/") for name in files) else "policy"


def export_best(context: RunContext, best: Best) -> Path:
    """Put a copy of the best policy so far into the run's own folder, with a manifest that proves it."""
    target, ref = context.settings.best_policy_folder(context.run), best.checkpoint.bare()
    export_part(context.store.fetch(ref), context.store.manifest(ref), ref, handed_over(context, best), target)
    return target
