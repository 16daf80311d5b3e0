"""What a run's data is, as people read it: rows, lengths, and what became of the rows of each source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from infra.engines.protocol import EngineInput, EngineJob
from tasks.reports.prefect import show_data
from tasks.stages.context import RunContext
from tasks.stages.jobs import ask
from tasks.stages.references import USES, DatasetRef, StageRef

WIDEST_BAR = 30
LEAKS = {
    "on_both_sides": "rows to train on have a held-out prompt: `dataset.duplicates: drop` takes them out",
    "examples_held_out": "SFT examples have a held-out prompt: `dataset.duplicates: drop` takes them out",
    "held_out_trained": "held-out rows have a prompt that is trained on: `duplicates: drop` takes it out of training",
}


def described(context: RunContext, dataset: DatasetRef) -> dict[str, Any]:
    """The numbers, as the scoring engine counts them in the stored dataset."""
    given = EngineInput(context.store.fetch(dataset.bare()), dataset.digest)
    silence = context.spec.engines.reward_timeout_s
    return ask(
        context.engines.scoring, EngineJob("describe_dataset", {"dataset": given}, None, {}), silence_s=silence
    ).result


def report_data(
    context: RunContext, name: str, data: StageRef, report: Mapping[str, Any], *notes: str
) -> dict[str, str]:
    """Show on Prefect's page what a run's `dataset` or `preferences` are; returns the files of it for MLflow."""
    page = "\n".join([dataset_page(context.run, report), *notes])
    show_data(context, name, data, page)
    return {f"{name}/report.json": json.dumps(report, indent=2), f"{name}/report.md": page}


def dataset_page(run: str, report: Mapping[str, Any]) -> str:
    """The numbers in markdown."""
    return "\n".join([f"# Data of run {run}", "", *_splits(report), *_sources(report), *_histograms(report)]) + "\n"


def _splits(report: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| rows to | rows | tokens: mean | median | longest |", "|---|---|---|---|---|")
    for split, facts in report["splits"].items():
        if facts["rows"]:
            lengths = f"{facts['mean']:.1f} | {facts['median']:g} | {facts['longest']}"
            yield f"| {USES[split]} | {facts['rows']:,} | {lengths} |"
    for key, words in LEAKS.items():
        if rows := report.get(key):
            yield from ("", f"{rows:,} {words}.")


def _sources(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["sources"]:
        return
    reasons = sorted({reason for one in report["sources"] for reason in one["dropped"]})
    names = ["source", "rows to", "read", "kept", "moved to held out", *reasons, "draws in an epoch"]
    yield from ("", f"| {' | '.join(names)} |", "|---" * len(names) + "|")
    for one in report["sources"]:
        counts = [one["read"], one["rows"], one["held_out"], *(one["dropped"].get(reason, 0) for reason in reasons)]
        cells = [one["source"], USES[one["split"]], *(f"{count:,}" for count in counts), f"{one.get('draws', ''):}"]
        yield f"| {' | '.join(cells)} |"


def _histograms(report: Mapping[str, Any]) -> Iterator[str]:
    for split, facts in report["splits"].items():
        most = max((rows for _, _, rows in facts["histogram"]), default=0)
        yield from ("", f"Rows to {USES[split]}, by their tokens:", "", "| tokens | rows | |", "|---|---|---|")
        for first, last, rows in facts["histogram"]:
            yield f"| {first} to {last} | {rows:,} | {'█' * round(WIDEST_BAR * rows / most)} |"
