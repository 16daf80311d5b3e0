"""Proof that a policy is what its record says: iterations are done again from what they started from.

record k-1 and the record k ─► each stage of iteration k, in fresh engines and a scratch store ─► the same digest?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from prefect.states import Completed
from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from flows.recovery import spec_at
from flows.stages import run_again
from tasks.prefect.flow_tags import also_tag, tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.run_state import record_at
from tasks.runs.verification import (
    Comparison,
    check_recorded,
    chosen_iterations,
    compared,
    open_verification,
    require_verifiable,
)
from tasks.stages.context import RunContext
from tasks.stages.download_source import download_sources
from tasks.stages.table import PREPARE_DATASET


class VerifyReport(BaseModel):
    """Every comparison up to the first that differs."""

    model_config = ConfigDict(frozen=True)

    run: str
    comparisons: list[Comparison]

    @property
    def first_difference(self) -> Comparison | None:
        """The stage that gave other bytes than recorded; None where all are the same."""
        return next((found for found in self.comparisons if not found.same), None)


def verify(run: str, iterations: str | None = None, folder: str | None = None) -> VerifyReport:
    """Make iterations of a run again and compare, up to the first difference.

    Args:
        run: Name of the run
        iterations: FIRST..LAST or one number; without it, all
        folder: Where the spec's folder (data, reward functions) is now, if it has moved
    """
    require_verifiable(run, iterations, folder)
    console = RunConsole(run, 0)
    with console, open_verification(run, folder, console.progress) as context:
        context.engines.start()
        also_tag(context.spec.name)
        found: list[Comparison] = []
        for comparison in verify_iterations(context, chosen_iterations(context.records, iterations)):
            found.append(comparison)
            verdict = "same" if comparison.same else f"DIFFERS: {comparison.found[:12]}"
            console.say(f"iteration {comparison.iteration}: {comparison.stage} {comparison.recorded[:12]} {verdict}")
        return told(VerifyReport(run=run, comparisons=found))


def told(report: VerifyReport) -> VerifyReport:
    """The flow has done its work: Prefect's page says with which verdict. Callers of the flow get the report."""
    differs, total = report.first_difference, len(report.comparisons)
    if differs is None:
        return cast(VerifyReport, Completed(message=f"all {total} stages reproduced the recorded bytes", data=report))
    where = f"iteration {differs.iteration}, stage {differs.stage}"
    message = f"{where} is the first that differs: recorded {differs.recorded}, found {differs.found}"
    return cast(VerifyReport, Completed(name="Differs", message=message, data=report))


def verify_iterations(context: RunContext, chosen: Iterable[int]) -> Iterator[Comparison]:
    """The comparisons of these iterations up to the first that differs, each with the spec and engines of its time."""
    for iteration in chosen:
        record = record_at(context.records, iteration)
        then = context.with_spec(spec_at(context, record))
        then.engines.serve(then.spec)
        for comparison in verify_iteration(then, record):
            yield comparison
            if not comparison.same:
                return


def verify_iteration(context: RunContext, record: IterationRecord) -> Iterator[Comparison]:
    """The stages of one iteration, each from its recorded inputs; first, that these are what was recorded."""
    check_recorded(context, record)
    number = record.iteration
    context.timings.iteration = number
    download_sources(context)
    yield compared(number, PREPARE_DATASET.name, record.dataset, prepare_dataset(context))
    previous = record_at(context.records, number - 1) if number else None
    for stage, made in run_again(context, record, previous):
        yield compared(number, stage.name, record.artifacts[stage.name], made)


verify_run: EmbeddedFlow[[str, str | None, str | None], VerifyReport] = EmbeddedFlow(
    fn=verify,
    name="verify-run",
    flow_run_name="verify-{run}",
    description="Make iterations of a run again from their recorded inputs and compare digests, stage by stage.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
