"""Reports are projections of the records: whatever MLflow and Prefect have not seen is told them, each point once.

An outage of tracking delays a curve and loses nothing: the next report starts from the records again.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect.logging import get_run_logger

from infra.mlflow.client import is_server
from infra.mlflow.system_metrics import SystemMetrics
from tasks.reports.mlflow import input_data, introduce, link_lineage, log_missing, show_progress
from tasks.reports.prefect import HEADLINES, show_iterations, show_samples
from tasks.runs.iteration_record import IterationRecord, read_record
from tasks.stages.context import Workbench
from tasks.stages.stage import stage, told


def begin_report(bench: Workbench, complain: Callable[[str | None], None], say: Callable[[str], None]) -> None:
    """Open the MLflow run and tell it what it is, while engines start; `complain` gets what was not taken.

    Of a server `say` gets the page; the pages of a database are opened by a command, which the end of a run names.
    From now on MLflow shows also how busy the machine is, and the losses of a supervised start as they come.
    """
    reporting = bench.reporting

    def begin() -> None:
        bench.tracker.open()
        reporting.introduced = introduce(bench)
        if not reporting.introduced:
            complain(complaint(bench))
        elif is_server(bench.tracker.uri):
            say(f"MLflow page {bench.tracker.page}")

    reporting.live, reporting.monitor = True, SystemMetrics(bench.tracker)
    reporting.aside(begin)
    reporting.monitor.start()


@stage("report", retries=0)
def report(bench: Workbench, record: IterationRecord) -> str | None:
    """Log what is missing up to `record`. Returns what is missing in the report, None where it is complete."""
    shown = {name: round(record.metrics[name], 4) for name in HEADLINES if name in record.metrics}
    get_run_logger().info("iteration %s: %s", record.iteration, shown)
    missing = _complaint(bench, lambda: _report(bench, record))
    return told(missing, missing or f"MLflow has all up to iteration {record.iteration}")


@stage("report_end", retries=0)
def report_end(bench: Workbench) -> str | None:
    """Whatever is missing, the last picture of the curves, and the end of the MLflow run."""
    missing = _complaint(bench, lambda: _report_end(bench))
    return told(missing, missing or "MLflow has the whole run")


def complaint(bench: Workbench) -> str:
    """Why MLflow lacks something."""
    return f"MLflow did not take this report: {bench.tracker.last_error or 'it is silent'}"


def _complaint(bench: Workbench, report: Callable[[], bool]) -> str | None:
    """Why a report is not complete. Whatever goes wrong in it, a report never ends a run."""
    with bench.timings.outside("tracking"):
        try:
            complete = report()
        except Exception as error:
            get_run_logger().warning("this report is not complete", exc_info=True)
            return f"this report is not complete: {type(error).__name__}: {error}"
    return None if complete else complaint(bench)


def _report(bench: Workbench, record: IterationRecord) -> bool:
    complete = _catch_up(bench, record)
    if record.evaluation is not None:
        bench.reporting.aside(lambda: show_progress(bench, record))
        show_samples(bench, record)
    show_iterations(bench)
    return complete


def _report_end(bench: Workbench) -> bool:
    bench.reporting.settle()
    bench.tracker.open()
    last = read_record(bench.records.read(bench.records.last() or 0))
    complete = _catch_up(bench, last)
    complete = complete and show_progress(bench, last)
    complete &= bench.tracker.finish()
    show_iterations(bench)
    return complete


def _catch_up(bench: Workbench, record: IterationRecord) -> bool:
    """As long as MLflow has not taken it also what the run is, what it starts from and which data it reads."""
    reporting = bench.reporting
    if not reporting.metrics:
        reporting.add(read_record(document) for document in bench.records.all())
    reporting.add([record])
    linked = reporting.linked or link_lineage(bench, record)
    complete = log_missing(bench, record)
    reporting.introduced = reporting.introduced or introduce(bench)
    if linked and reporting.introduced and not reporting.linked:
        reporting.linked = bench.tracker.log_datasets(input_data(bench.spec, record.dataset))
    return complete and reporting.linked
