"""Evaluation as a flow: how well a policy answers held-out prompts.

models:/NAME@ALIAS, or RUN@ITERATION ─► its run's spec ─► prepare_dataset ─► evaluate_policy ─► MLflow, Prefect's page

The rollout and scoring engines suffice. What was evaluated before, in the run itself too, comes from the store.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from tasks.policies.held_out import evaluate_held_out, open_evaluation
from tasks.policies.policy import find_policy
from tasks.policies.report_evaluation import report_evaluation
from tasks.prefect.flow_tags import also_tag, tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.stages.references import DatasetRef, EvaluationRef


class EvaluationReport(BaseModel):
    """How a policy did."""

    model_config = ConfigDict(frozen=True)

    policy: str
    run: str
    iteration: int
    prompts: int
    dataset: DatasetRef
    evaluation: EvaluationRef
    complaint: str | None = None


def evaluate(model: str, overrides: list[str] | None = None, folder: str | None = None) -> EvaluationReport:
    """Evaluate a policy on the held-out prompts of its run's spec, sampled and greedy.

    Args:
        model: models:/NAME@ALIAS, models:/NAME/VERSION, RUN (its best policy) or RUN@ITERATION
        overrides: section.key=value over the run's spec, for example evaluation.num_prompts=1000
        folder: Where the spec's folder (data, reward functions) is now, if it has moved
    """
    policy = find_policy(model, folder)
    also_tag(policy.run, policy.spec.name)
    spec = policy.spec.with_overrides(overrides or [])
    title = f"evaluation of {policy.run}@{policy.iteration}"
    console = RunConsole(title, 0)
    with console, open_evaluation(policy, spec, title, console.progress) as context:
        dataset, evaluation = evaluate_held_out(context, policy)
        complaint = report_evaluation(context, policy, evaluation)
    return EvaluationReport(
        policy=policy.name,
        run=policy.run,
        iteration=policy.iteration,
        prompts=spec.evaluation.num_prompts,
        dataset=dataset,
        evaluation=evaluation,
        complaint=complaint,
    )


evaluation: EmbeddedFlow[[str, list[str] | None, str | None], EvaluationReport] = EmbeddedFlow(
    fn=evaluate,
    name="evaluation",
    flow_run_name="evaluate-{model}",
    description="Evaluate a registered policy, or a run's, on held-out prompts.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
