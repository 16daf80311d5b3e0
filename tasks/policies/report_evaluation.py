"""What MLflow and Prefect's pages show of an evaluation: projections of the artifact, each point once."""

from __future__ import annotations

from datetime import datetime

from prefect.artifacts import create_markdown_artifact

from infra.mlflow.tracking import Point
from tasks.policies.policy import Policy
from tasks.reports.prefect import answer_line, page_key, prompt_text, see_mlflow, tell_prefect
from tasks.stages.context import RunContext
from tasks.stages.references import EvaluationRef
from tasks.stages.stage import stage


@stage("report_evaluation", retries=0)
def report_evaluation(context: RunContext, policy: Policy, evaluation: EvaluationRef) -> str | None:
    """One MLflow run for each evaluation, by its digest. Returns what MLflow did not take, None where it has it all."""
    made = context.store.manifest(evaluation.bare()).created_at
    made_ms = int(datetime.fromisoformat(made).timestamp() * 1000)
    tags = {
        "ppoflow.evaluation": evaluation.digest,
        "ppoflow.policy": policy.checkpoint.digest,
        "ppoflow.of_run": policy.run,
        "ppoflow.iteration": str(policy.iteration),
        "mlflow.note.content": f"{policy.name} (run {policy.run}, iteration {policy.iteration}) on held-out prompts.",
    }
    if policy.version is not None:
        tags["ppoflow.version"] = f"models:/{policy.version.name}/{policy.version.version}"
    points = [Point(name, value, policy.iteration, made_ms) for name, value in sorted(evaluation.metrics.items())]
    rows = [[prompt_text(s["prompt"]), s["response"], s["score"]] for s in evaluation.samples]
    context.tracker.run_key = evaluation.digest
    complete = context.tracker.open() and context.tracker.set_tags(tags) and context.tracker.log_points(points)
    complete = complete and context.tracker.log_table("samples", ("prompt", "response", "score"), rows)
    complete = context.tracker.finish() and complete
    text, key = page(policy, evaluation), page_key(policy.run, f"evaluation-{policy.iteration}")
    about = f"How {policy.name} answers held-out prompts: {evaluation.in_words()}{see_mlflow(context)}"
    tell_prefect(context, "the evaluation", lambda: create_markdown_artifact(text, key=key, description=about))
    return None if complete else context.tracker.last_error or "it does not answer"


def page(policy: Policy, evaluation: EvaluationRef) -> str:
    """The metrics as a table, and a few answers."""
    rows = [f"| {name} | {value:.4f} |" for name, value in sorted(evaluation.metrics.items())]
    answers = [answer_line(sample) for sample in evaluation.samples]
    title = f"# {policy.name}: run {policy.run}, iteration {policy.iteration}"
    return "\n\n".join([title, "\n".join(["| metric | |", "|---|---|", *rows]), "\n".join(answers)])
