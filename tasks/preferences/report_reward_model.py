"""What MLflow and Prefect's pages show of a reward model: projections of the artifacts, each point once."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

from prefect.artifacts import create_markdown_artifact

from infra.mlflow.client import is_server
from infra.mlflow.learning_curves import Panel, learning_curves
from infra.mlflow.tracking import InputData, Point
from ppo_core.records import content_digest
from ppo_core.spec import PreferencesSpec
from tasks.preferences.context import PreferenceContext, RewardModelContext
from tasks.preferences.stages import PreferencesRef, RewardEvaluationRef, RewardModelRef
from tasks.preferences.train_reward_model import LOSS_CURVE
from tasks.reports.dataset import report_data
from tasks.reports.loss_curve import points, prepared_at_ms
from tasks.reports.mlflow import NOTE, origin
from tasks.reports.prefect import page_key, see_mlflow, tell_prefect
from tasks.runs.run_state import flat
from tasks.stages.stage import completed, stage

SURE = [(0.5, 0.5), (1.0, 1.0)]
NOT_LEARNED_FROM = {"engines", "folder", "registry"}
"""Sections of a spec that change nothing in what is trained."""


def begin_report(context: PreferenceContext, preferences: PreferencesRef, say: Callable[[str], None]) -> None:
    """Open the MLflow run and describe it; from now on losses are sent as they come.

    A run of this name that trains something else, by other settings or data, has another MLflow run: curves and
    figures of two models would stand side by side in one.
    """
    trained = content_digest([context.spec.model_dump(mode="json", exclude=NOT_LEARNED_FROM), preferences.digest])
    context.tracker.run_key = f"{context.tracker.run_key}-{trained[:16]}"

    def begin() -> None:
        if introduce(context) and is_server(context.tracker.uri):
            say(f"MLflow page {context.tracker.page}")

    context.reporting.live = True
    context.reporting.aside(begin)


def introduce(context: PreferenceContext) -> bool:
    """Say what this run is."""
    document, tracker = context.spec.document(), context.tracker
    note = f"Training of a {context.makes} on preferences: run **{context.run}** of spec `{context.spec.name}`."
    sent = tracker.open() and tracker.log_parameters(flat(document))
    sent = sent and tracker.log_text("spec.json", json.dumps(document, indent=2))
    return sent and tracker.set_tags(origin(context.spec) | {NOTE: note})


@stage("report_reward_model", retries=0)
def report_reward_model(
    context: RewardModelContext, dataset: PreferencesRef, model: RewardModelRef, evaluation: RewardEvaluationRef
) -> str | None:
    """Everything there is to see. Returns what MLflow did not take, None where it has it all."""
    context.reporting.settle()
    tracker, at_ms = context.tracker, prepared_at_ms(context, model)
    metrics = {**model.metrics, **evaluation.metrics}
    measured = [Point(name, value, len(model.losses), at_ms) for name, value in sorted(metrics.items())]
    curve = points(dict(enumerate(model.losses, 1)), prepared_at_ms(context, dataset), LOSS_CURVE)
    files = report_preferences(context, dataset)
    rows = [[part["confidence"], part["accuracy"], part["count"]] for part in evaluation.calibration]
    complete = (
        introduce(context)
        and tracker.log_datasets(input_data(context.spec.dataset, dataset))
        and all(tracker.log_text(name, text) for name, text in files.items())
        and tracker.log_points(curve)
        and tracker.log_points(measured)
        and tracker.log_table("calibration", ("confidence", "accuracy", "pairs"), rows)
        and tracker.log_figure("reward_model", learning_curves(context.run, panels(model, evaluation)))
    )
    complete = tracker.finish() and complete
    text, key = page(f"Reward model of {context.run}", metrics), page_key(context.run, "reward-model")
    about = f"The reward model of run {context.run}: {evaluation.in_words()}{see_mlflow(context)}"
    tell_prefect(context, "the reward model", lambda: create_markdown_artifact(text, key=key, description=about))
    missing = None if complete else f"MLflow did not take this report: {tracker.last_error or 'it is silent'}"
    return completed(missing, missing or "MLflow has it all")


def report_preferences(context: PreferenceContext, preferences: PreferencesRef) -> dict[str, str]:
    """Show on Prefect's page what the preferences are; returns the files of it for MLflow."""
    note = "A row of preferences is as long as its longest text."
    return report_data(context, "preferences", preferences, preferences.described, note)


def panels(model: RewardModelRef, evaluation: RewardEvaluationRef) -> list[Panel]:
    """The loss, how right the model is where it is sure, and how its scores are spread."""
    spread = evaluation.distribution
    middles = [(low + high) / 2 for low, high in pairwise(spread["edges"])]
    return [
        Panel("loss", {"loss": list(enumerate(model.losses, 1))}, x="optimizer step"),
        Panel(
            "accuracy where it is sure",
            {"held out": [(p["confidence"], p["accuracy"]) for p in evaluation.calibration], "calibrated": SURE},
            limits=(0.0, 1.05),
            x="probability of the better response",
        ),
        Panel(
            "held-out responses",
            {name: list(zip(middles, spread[name], strict=True)) for name in ("best", "others")},
            x="score",
        ),
    ]


def input_data(spec: PreferencesSpec, dataset: PreferencesRef) -> list[InputData]:
    """The run's preferences as MLflow shows inputs."""
    names = {"training": ("train", spec.label), "evaluation": ("eval", spec.evaluation or spec.label)}
    return [
        InputData(f"{name} ({usage})", usage, dataset.digest, dataset.uri, dataset.counts[split])
        for usage, (split, name) in names.items()
    ]


def page(title: str, metrics: dict[str, float]) -> str:
    """The metrics as a table."""
    rows = [f"| {name} | {value:.4f} |" for name, value in sorted(metrics.items())]
    return "\n".join([f"# {title}", "", "| metric | |", "|---|---|", *rows])
