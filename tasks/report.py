"""Reports are projections of the records: whatever MLflow and Prefect have not seen is sent, each point once.

An outage of tracking delays a curve and loses nothing: the next report starts from the records again.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from infra.mlflow.client import is_server
from infra.mlflow.system_metrics import SystemMetrics
from tasks.reports.dataset import described, report_data
from tasks.reports.mlflow import input_data, introduce, link_lineage, log_missing, show_progress
from tasks.reports.prefect import HEADLINES, show_iterations, show_samples
from tasks.runs.guards import unseen
from tasks.runs.iteration_record import IterationRecord, read_record
from tasks.runs.retention import Garbage
from tasks.runs.run_state import record_at
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef
from tasks.stages.stage import completed, stage

PICTURE_EVERY_S = 30.0
SHOWN_GARBAGE = 1000
"""Rows of the table of garbage."""


def begin_report(
    context: RunContext,
    record: IterationRecord | None,
    complain: Callable[[str | None], None],
    say: Callable[[str], None],
) -> None:
    """Open the MLflow run and describe it, while engines start, with the last `record`; `complain` gets what failed.

    Of a server `say` gets the page; the pages of a database are opened by a command, which the end of a run names.
    From now on MLflow shows also how busy the machine is, and the losses of a supervised start as they come.
    """
    reporting = context.reporting

    def begin() -> None:
        context.tracker.open()
        reporting.introduced = introduce(context, record)
        reporting.shown_in = context.tracker.run_id
        if not reporting.introduced:
            complain(complaint(context))
        elif is_server(context.tracker.uri):
            say(f"MLflow page {context.tracker.page}")

    reporting.live, reporting.monitor = True, SystemMetrics(context.tracker)
    reporting.aside(begin)
    reporting.monitor.start()


@stage("report_dataset", retries=0)
def report_dataset(context: RunContext, dataset: DatasetRef) -> str | None:
    """What the data is: on Prefect's page now, in MLflow with the next report. Returns why not, where it failed."""

    def tell() -> bool:
        context.reporting.data = report_data(context, "dataset", dataset, described(context, dataset))
        return True

    missing = _complaint(context, tell)
    return completed(missing, missing or dataset.in_words())


@stage("report", retries=0)
def report(context: RunContext, record: IterationRecord) -> str | None:
    """Log what is missing up to `record`. Returns what is missing in the report, None where it is complete."""
    shown = {name: round(record.metrics[name], 4) for name in HEADLINES if name in record.metrics}
    get_run_logger().info("iteration %s: %s", record.iteration, shown)
    for blind in unseen(context.spec, record):
        get_run_logger().warning(blind)
    missing = _complaint(context, lambda: _report(context, record))
    return completed(missing, missing or f"MLflow has all up to iteration {record.iteration}")


def report_rollback(context: RunContext, record: IterationRecord) -> None:
    """Have the description and the picture of the curves say again how far the run is: at `record`."""
    _complaint(context, lambda: show_progress(context, record))


@stage("report_end", retries=0)
def report_end(context: RunContext) -> str | None:
    """Whatever is missing, the last picture of the curves, and the end of the MLflow run."""
    missing = _complaint(context, lambda: _report_end(context))
    return completed(missing, missing or "MLflow has the whole run")


def complaint(context: RunContext) -> str:
    """Why MLflow lacks something."""
    return f"MLflow did not take this report: {context.tracker.last_error or 'it is silent'}"


def _complaint(context: RunContext, report: Callable[[], bool]) -> str | None:
    """Why a report is not complete. Whatever goes wrong in it, a report never ends a run."""
    with context.timings.outside("tracking"):
        try:
            complete = report()
        except Exception as error:
            get_run_logger().warning("this report is not complete", exc_info=True)
            return f"this report is not complete: {type(error).__name__}: {error}"
    return None if complete else complaint(context)


def _report(context: RunContext, record: IterationRecord) -> bool:
    complete = _catch_up(context, record)
    context.reporting.aside(lambda: show_progress(context, record, at_most_every_s=PICTURE_EVERY_S))
    if record.evaluation is not None:
        show_samples(context, record)
    show_iterations(context)
    return complete


def _report_end(context: RunContext) -> bool:
    context.reporting.settle()
    context.tracker.open()
    last = record_at(context.records, context.records.last() or 0)
    complete = _catch_up(context, last)
    complete = complete and show_progress(context, last)
    complete &= context.tracker.finish()
    show_iterations(context)
    return complete


def _catch_up(context: RunContext, record: IterationRecord) -> bool:
    """All that MLflow has not yet. Where somebody has deleted its run, another one gets all of it."""
    _forget_a_deleted_run(context)
    complete = _send_missing(context, record)
    return complete or (_forget_a_deleted_run(context) and _send_missing(context, record))


def _forget_a_deleted_run(context: RunContext) -> bool:
    """What was reported to an MLflow run that is the run's no longer is yet to be reported; whether there was one."""
    reporting, now = context.reporting, context.tracker.run_id
    another = reporting.shown_in not in (None, now)
    if another:
        reporting.introduced = reporting.linked = False
        context.reported.clear()
        reporting.pointed.clear()
    reporting.shown_in = now
    return another


def _send_missing(context: RunContext, record: IterationRecord) -> bool:
    """As long as MLflow has not taken it also what the run is, what it starts from and which data it reads."""
    reporting = context.reporting
    if not reporting.metrics:
        reporting.metrics |= {one.iteration: one.metrics for one in map(read_record, context.records.all())}
    reporting.metrics[record.iteration] = record.metrics
    linked = reporting.linked or link_lineage(context, record)
    complete = log_missing(context, record)
    reporting.introduced = reporting.introduced or introduce(context, record)
    if linked and reporting.introduced and not reporting.linked:
        sent = all(context.tracker.log_text(name, text) for name, text in reporting.data.items())
        reporting.linked = sent and context.tracker.log_datasets(input_data(context.spec, record.dataset))
    reporting.shown_in = reporting.shown_in or context.tracker.run_id
    return complete and reporting.linked


@stage("show_garbage", retries=0)
def show_garbage(garbage: Garbage, *, removed: bool) -> None:
    """The table of what goes, or could."""
    rows = [{"what": what, "MiB": round(size / 2**20, 1), "why": why} for what, size, why in garbage.rows()]
    verb = "removed" if removed else "found"
    unread = "".join(
        f"\n\nWhat {whose} needs cannot be read, so every artifact is kept: {why}"
        for whose, why in garbage.unreadable.items()
    )
    create_table_artifact(
        rows[:SHOWN_GARBAGE], key="store-garbage", description=f"{len(rows)} things that nobody needs, {verb}{unread}"
    )
