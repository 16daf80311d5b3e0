"""Reports are projections of the records: whatever MLflow and Prefect have not seen is told them, each point once.

An outage of tracking delays a curve and loses nothing: the next report starts from the records again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.logging import get_run_logger

from infra.figures import Panel, learning_curves
from infra.tracking import Point
from tasks.iteration_record import IterationRecord, read_record
from tasks.open_run import flat
from tasks.stage import stage
from tasks.workbench import Workbench

PAGE_PATIENCE_S = 6.0
SEEN_BY = "seconds/iteration"
HEADLINES = ("score/mean", "evaluation/accuracy", "kl/reference", "rollout/response_length", "seconds/iteration")
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


@stage("report", retries=0)
def report(bench: Workbench, record: IterationRecord) -> str | None:
    """Log what is missing up to `record`. Returns what is missing in the report, None where it is complete."""
    shown = {name: round(record.metrics[name], 4) for name in HEADLINES if name in record.metrics}
    get_run_logger().info("iteration %s: %s", record.iteration, shown)
    return _complaint(bench, lambda: _report(bench, record))


@stage("report_end", retries=0)
def report_end(bench: Workbench) -> str | None:
    """The curves as one figure, the table of all iterations in Prefect, and the end of the MLflow run."""
    return _complaint(bench, lambda: _report_end(bench))


def _complaint(bench: Workbench, report: Callable[[], bool]) -> str | None:
    """Why a report is not complete. Whatever goes wrong in it, a report never ends a run."""
    with bench.timings.outside("tracking"):
        try:
            complete = report()
        except Exception as error:
            get_run_logger().warning("this report is not complete", exc_info=True)
            return f"this report is not complete: {type(error).__name__}: {error}"
    return None if complete else f"MLflow did not take this report: {bench.tracker.last_error or 'it is silent'}"


def _report(bench: Workbench, record: IterationRecord) -> bool:
    if not bench.reported:
        _introduce(bench, record)
    complete = _log_missing(bench, record)
    if record.evaluation is not None:
        _show_samples(bench, record)
    return complete


def _report_end(bench: Workbench) -> bool:
    records = [read_record(document) for document in bench.records.all()]
    bench.tracker.open()
    if not bench.reported:
        _introduce(bench, records[-1])
    complete = _log_missing(bench, records[-1])
    complete &= bench.tracker.log_figure("learning_curves", learning_curves(bench.run, panels(records)))
    complete &= bench.tracker.finish()
    rows = [{"iteration": r.iteration, **{k: round(v, 4) for k, v in r.metrics.items()}} for r in records]
    description = f"All iterations of run {bench.run}"
    key = page_key(bench.run, "iterations")
    tell_prefect(
        bench, "the table of iterations", lambda: create_table_artifact(rows, key=key, description=description)
    )
    return complete


def panels(records: list[IterationRecord]) -> list[Panel]:
    """The learning curves that have any points."""
    made = []
    for title, names in CURVES.items():
        lines = {n: [(float(r.iteration), r.metrics[n]) for r in records if n in r.metrics] for n in names}
        drawn = {name: points for name, points in lines.items() if points}
        if drawn:
            made.append(Panel(title, drawn, (0.0, 1.0) if "accuracy" in title else None))
    return made


def _introduce(bench: Workbench, record: IterationRecord) -> None:
    """Parameters, lineage tags and the spec, at this process's first report."""
    document = bench.spec.document()
    bench.tracker.log_parameters(flat(document))
    bench.tracker.log_text("spec.json", json.dumps(document, indent=2))
    bench.tracker.set_tags(
        {
            "ppoflow.spec_digest": record.spec_digest,
            "ppoflow.dataset_digest": record.dataset.digest,
            "ppoflow.reference_digest": record.reference.digest,
        }
    )
    seen = bench.tracker.seen_points(SEEN_BY)
    if seen:  # by their time: an iteration that was done again has another record, and new points
        records = (read_record(document) for document in bench.records.all())
        bench.reported.update(r.iteration for r in records if (r.iteration, r.committed_at_ms) in seen)


def _log_missing(bench: Workbench, record: IterationRecord) -> bool:
    """Tables before points: an iteration whose points are there has been told completely."""
    missing = [i for i in range(record.iteration + 1) if i not in bench.reported]
    if not missing:
        return True
    documents = [record if i == record.iteration else read_record(bench.records.read(i)) for i in missing]
    told = all(_log_samples(bench, r) for r in documents)
    points = [Point(k, v, r.iteration, r.committed_at_ms) for r in documents for k, v in sorted(r.metrics.items())]
    told = told and bench.tracker.log_points(points)
    if told:
        bench.reported.update(missing)
    return told


def _log_samples(bench: Workbench, record: IterationRecord) -> bool:
    if record.evaluation is None:
        return True
    columns = ("iteration", "prompt", "response", "score")
    rows = [[record.iteration, prompt_text(s["prompt"]), s["response"], s["score"]] for s in record.evaluation.samples]
    return bench.tracker.log_table(f"samples/iteration_{record.iteration:06d}", columns, rows)


def _show_samples(bench: Workbench, record: IterationRecord) -> None:
    assert record.evaluation is not None
    samples = record.evaluation.samples
    lines = [f"- `{prompt_text(s['prompt'])}` → `{s['response']}` (score {s['score']})" for s in samples]
    text = f"# {bench.run}, iteration {record.iteration}\n\n" + "\n".join(lines)
    key = page_key(bench.run, "samples")
    tell_prefect(bench, "the sample answers", lambda: create_markdown_artifact(text, key=key))


def tell_prefect(bench: Workbench, what: str, create: Callable[[], object]) -> None:
    """Reports never stop training, nor hold it up: a server that is away costs a page, and a line in the log.

    Prefect's own client would try for a minute, at every report anew.
    """
    context = copy_context()
    if bench.pages.call(lambda: context.run(create), PAGE_PATIENCE_S) is None:
        get_run_logger().warning("Prefect did not get %s: %s", what, bench.pages.last_error)


def prompt_text(prompt: Any) -> str:
    """A prompt as one text; the messages of a chat in turn."""
    return prompt if isinstance(prompt, str) else " / ".join(str(message.get("content")) for message in prompt)


def page_key(run: str, name: str) -> str:
    """A key that Prefect takes for what it shows of a run."""
    return "".join(c if c.isalnum() else "-" for c in f"{run}-{name}".lower())
