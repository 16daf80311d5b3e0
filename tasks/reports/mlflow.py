"""What MLflow gets of a run: what it is, its curves and answers, and the picture of them; each point once."""

from __future__ import annotations

import json
import time
from pathlib import Path

from prefect.runtime import deployment, flow_run

from infra.mlflow.current_user import current_user
from infra.mlflow.git_commit import git_commit
from infra.mlflow.learning_curves import Panel, learning_curves
from infra.mlflow.tracking import InputData, Point
from ppo_core.spec import DpoSpec, RunSpec
from ppo_core.spec.flow_spec import FlowSpec
from ppo_core.spec.reward.section import OF_THE_WHOLE_SCORE
from tasks.prefect.client import deployment_id
from tasks.prefect.server import configured_url, page_url
from tasks.reports.loss_curve import curve_points
from tasks.reports.prefect import prompt_text
from tasks.runs.iteration_record import IterationRecord, best_in_words, read_record
from tasks.runs.run_state import flat, record_at
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef

NOTE = "mlflow.note.content"
SEEN_BY = "seconds/iteration"
CURVES = {
    "score": ("score/mean", "evaluation/score", "evaluation/greedy_score"),
    "held-out accuracy": ("evaluation/accuracy", "evaluation/greedy_accuracy"),
    "KL per response": ("kl/reference",),
    "response length": ("rollout/response_length",),
    "entropy": ("policy/entropy",),
    "clip fraction": ("policy/clip_fraction",),
    "explained variance": ("critic/explained_variance",),
    "gradient norm": ("policy/gradient_norm", "critic/gradient_norm"),
    "seconds": ("seconds/iteration", "seconds/outside_engines"),
}
NO_REWARDS = frozenset(f"score/{name}" for name in OF_THE_WHOLE_SCORE)
SPLITS = {"training": "train", "evaluation": "eval", "supervised": "sft"}
"""What MLflow calls the use of data, and the dataset's name of the split."""


def introduce(context: RunContext, record: IterationRecord | None) -> bool:
    """Say what this run is: settings, the spec, who started it, from where, how far it is, and how to go on with it."""
    document = context.spec.document()
    sent = context.tracker.log_parameters(flat(document))
    sent = sent and context.tracker.log_text("spec.json", json.dumps(document, indent=2))
    return sent and context.tracker.set_tags(origin(context.spec) | {NOTE: description(context, record)})


def origin(spec: FlowSpec) -> dict[str, str]:
    """Who started the run and from where, as MLflow's own tags have it."""
    folder = Path(spec.folder).absolute()
    tags = {
        "mlflow.user": current_user().partition("@")[0],
        "mlflow.source.name": str((deployment_id() and deployment.name) or folder),
        "mlflow.source.type": "JOB" if deployment_id() else "LOCAL",
    }
    commit = git_commit(folder)
    return tags if commit is None else {**tags, "mlflow.source.git.commit": commit}


def description(context: RunContext, record: IterationRecord | None) -> str:
    """What people read first on the run's page; with a record also how far it is, and which policy is the best."""
    spec, run = context.spec, context.run
    lines = [f"PPO training run **{run}** of spec `{spec.name}`, {spec.iterations} iterations."]
    if record is not None:
        metrics = context.reporting.metrics.get(record.best.iteration)
        best = best_in_words(record.best, metrics or record_at(context.records, record.best.iteration).metrics)
        lines.append(f"Iteration {record.iteration} of {spec.iterations} is done; {best}.")
    commands = {
        "continue it": f"ppoflow resume {run}",
        "verify it": f"ppoflow verify {run}",
        "sample its best policy": f'ppoflow sample {run} "…"',
    }
    lines.append("\n".join(f"- {what}: `{command}`" for what, command in commands.items()))
    if configured_url() and flow_run.id:
        lines.append(f"[The flow run in Prefect]({page_url()}/runs/flow-run/{flow_run.id})")
    return "\n\n".join(lines)


def input_data(spec: RunSpec | DpoSpec, dataset: DatasetRef) -> list[InputData]:
    """The run's data as MLflow shows inputs. Names differ by their use: MLflow knows data by name and digest."""
    names = {
        "training": spec.dataset.label,
        "evaluation": spec.dataset.evaluation or spec.dataset.label,
        "supervised": spec.sft.data if spec.sft else None,
    }
    return [
        InputData(f"{name} ({usage})", usage, dataset.digest, dataset.uri, dataset.counts[SPLITS[usage]])
        for usage, name in names.items()
        if name and dataset.counts.get(SPLITS[usage])
    ]


def link_lineage(context: RunContext, record: IterationRecord) -> bool:
    """Tags of what the run starts from; and which of its points are there already."""
    tags = {
        "ppoflow.spec_digest": record.spec_digest,
        "ppoflow.dataset_digest": record.dataset.digest,
        "ppoflow.reference_digest": record.reference.digest,
    }
    sent = context.tracker.set_tags(tags)
    seen = context.tracker.seen_points(SEEN_BY)
    if seen:  # by their time: an iteration that was done again has another record, and new points
        records = (read_record(document) for document in context.records.all())
        context.reported.update(r.iteration for r in records if (r.iteration, r.committed_at_ms) in seen)
    return sent


def log_missing(context: RunContext, record: IterationRecord) -> bool:
    """Points, then tables, which a server may fail to store; last the point by which an iteration is known as reported
    completely, of those whose table it has."""
    missing = [i for i in range(record.iteration + 1) if i not in context.reported]
    if not missing:
        return True
    documents = [record if i == record.iteration else record_at(context.records, i) for i in missing]
    new = [r for r in documents if r.iteration not in context.reporting.pointed]
    points = [Point(k, v, r.iteration, r.committed_at_ms) for r in new for k, v in sorted(r.metrics.items())]
    curves = [[point for r in new for point in curve_points(context, r)], [p for p in points if p.key != SEEN_BY]]
    if not all(context.tracker.log_points(curve) for curve in curves):
        return False
    context.reporting.pointed.update(missing)
    mlflow_run = context.tracker.run_id
    stored = [r for r in documents if _log_samples(context, r)]
    last = [Point(SEEN_BY, r.metrics[SEEN_BY], r.iteration, r.committed_at_ms) for r in stored if SEEN_BY in r.metrics]
    # Where somebody has deleted the run meanwhile, another one has the tables, and none of the points yet.
    if context.tracker.run_id != mlflow_run or not context.tracker.log_points(last):
        return False
    context.reported.update(r.iteration for r in stored)
    return len(stored) == len(documents)


def show_progress(context: RunContext, record: IterationRecord, *, at_most_every_s: float = 0.0) -> bool:
    """In the run's description how far it is, and the learning curves so far as one picture, which takes a third of a
    second to draw: not where the last one is younger than `at_most_every_s`."""
    described = context.tracker.set_tags({NOTE: description(context, record)})
    if time.monotonic() - context.reporting.drawn_at < at_most_every_s:
        return described
    drawn = panels(context.reporting.metrics)
    if not drawn:  # nothing was reported yet since the process began; the next report draws all
        return described
    context.reporting.drawn_at = time.monotonic()
    return described and context.tracker.log_figure("learning_curves", learning_curves(context.run, drawn))


def panels(metrics: dict[int, dict[str, float]]) -> list[Panel]:
    """The learning curves that have any points."""
    made = []
    for title, names in CURVES.items():
        lines = {n: [(float(i), metrics[i][n]) for i in sorted(metrics) if n in metrics[i]] for n in names}
        drawn = {name: points for name, points in lines.items() if points}
        if drawn:
            made.append(Panel(title, drawn, (0.0, 1.0) if "accuracy" in title else None))
    return [*made, *frontier(metrics)]


def frontier(metrics: dict[int, dict[str, float]]) -> list[Panel]:
    """What each iteration scored at which KL, and by each reward where there are several.

    Source: Gao et al. 2022 (arXiv:2210.10760), figure 1: a gold reward that bends down is over-optimisation.
    """
    measured = [metrics[i] for i in sorted(metrics) if "kl/reference" in metrics[i]]
    names = sorted({name for one in measured for name in one if name.startswith("score/")} - NO_REWARDS)
    lines = {
        name: [(one["kl/reference"], one[name]) for one in measured if name in one]
        for name in ("score/mean", *(names if len(names) > 1 else ()))
    }
    drawn = {name: points for name, points in lines.items() if points}
    return [Panel("score by KL", drawn, x="KL per response, nats")] if drawn else []


def _log_samples(context: RunContext, record: IterationRecord) -> bool:
    if record.evaluation is None:
        return True
    columns = ("iteration", "prompt", "response", "score")
    rows = [[record.iteration, prompt_text(s["prompt"]), s["response"], s["score"]] for s in record.evaluation.samples]
    return context.tracker.log_table(f"samples/iteration_{record.iteration:06d}", columns, rows)
