"""What MLflow and Prefect's pages show of a policy that learned from preferences: projections, each point once."""

from __future__ import annotations

from collections.abc import Mapping

from prefect.artifacts import create_markdown_artifact

from infra.mlflow.learning_curves import Panel, learning_curves
from infra.mlflow.tracking import Point
from tasks.preferences.context import DpoContext
from tasks.preferences.report_reward_model import input_data, introduce, page, report_preferences
from tasks.preferences.stages import DpoPolicyRef, PreferencesRef
from tasks.preferences.train_dpo import LOSS_CURVE
from tasks.reports.loss_curve import LOSS_CURVE as SFT_CURVE
from tasks.reports.loss_curve import points, prepared_at_ms
from tasks.reports.mlflow import input_data as prompts
from tasks.reports.prefect import page_key, prompt_text, see_mlflow, tell_prefect
from tasks.stages.references import DatasetRef, EvaluationRef, ModelRef, StageRef
from tasks.stages.stage import completed, stage


@stage("report_dpo", retries=0)
def report_dpo(
    context: DpoContext,
    dataset: DatasetRef,
    preferences: PreferencesRef,
    model: ModelRef | None,
    policy: DpoPolicyRef,
    evaluations: Mapping[str, EvaluationRef],
) -> str | None:
    """Everything there is to see. Returns what MLflow did not take, None where it has it all.

    `evaluations` are those of the start, and of the policy as `after`.
    """
    context.reporting.settle()
    tracker, steps = context.tracker, len(policy.curves[LOSS_CURVE])
    held_out = {name: value for name, value in policy.metrics.items() if name.startswith("evaluation/")}
    measured = [Point(name, value, steps, prepared_at_ms(context, policy)) for name, value in sorted(held_out.items())]
    for when, evaluation in evaluations.items():
        step, at_ms = steps if when == "after" else 0, prepared_at_ms(context, evaluation)
        measured += [Point(name, value, step, at_ms) for name, value in sorted(evaluation.metrics.items())]
    curves = [
        point
        for name, values in policy.curves.items()
        for point in points(dict(enumerate(values, 1)), prepared_at_ms(context, preferences), name)
    ]
    if model is not None:
        curves += points(dict(enumerate(model.losses, 1)), prepared_at_ms(context, dataset), SFT_CURVE)
    answers = [
        [when, prompt_text(sample["prompt"]), sample["response"], sample["score"]]
        for when, evaluation in evaluations.items()
        for sample in evaluation.samples
    ]
    files = report_preferences(context, preferences)
    held_out_prompts = [data for data in prompts(context.spec, dataset) if data.context != "training"]
    complete = (
        introduce(context)
        and tracker.log_datasets([*input_data(context.spec.preferences, preferences), *held_out_prompts])
        and all(tracker.log_text(name, text) for name, text in files.items())
        and tracker.log_points(curves)
        and tracker.log_points(measured)
        and tracker.log_table("samples", ("when", "prompt", "response", "score"), answers)
        and tracker.log_figure("dpo", learning_curves(context.run, panels(policy)))
    )
    complete = tracker.finish() and complete
    text, key = page(f"DPO run {context.run}", all_metrics(policy, evaluations)), page_key(context.run, "dpo")
    about = f"The policy of DPO run {context.run}: {policy.in_words()}{see_mlflow(context)}"
    tell_prefect(context, "the policy", lambda: create_markdown_artifact(text, key=key, description=about))
    missing = None if complete else f"MLflow did not take this report: {tracker.last_error or 'it is silent'}"
    return completed(missing, missing or "MLflow has it all")


def all_metrics(policy: DpoPolicyRef, evaluations: Mapping[str, StageRef]) -> dict[str, float]:
    """What was measured, the evaluation of the start under names of its own."""
    found = dict(policy.metrics)
    for when, evaluation in evaluations.items():
        prefix = "" if when == "after" else f"{when}/"
        found |= {f"{prefix}{name}": value for name, value in evaluation.metrics.items()}
    return found


def panels(policy: DpoPolicyRef) -> list[Panel]:
    """Loss, implicit rewards, and how often the better response has the higher one."""
    curves = {name: list(enumerate(values, 1)) for name, values in policy.curves.items()}
    rewards = {name.removeprefix("rewards/"): line for name, line in curves.items() if name.startswith("rewards/")}
    step = "optimizer step"
    return [
        Panel("loss", {"loss": curves[LOSS_CURVE]}, x=step),
        Panel("implicit rewards", {name: rewards[name] for name in ("chosen", "rejected", "margins")}, x=step),
        Panel("accuracy", {"accuracy": rewards["accuracies"]}, limits=(0.0, 1.05), x=step),
    ]
