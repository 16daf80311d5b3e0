"""How flows that learn from preferences begin, and what they leave: training a reward model, and DPO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from flows.recovery import clean_up
from infra.artifacts.export import exported_from
from ppo_core.spec import DpoSpec, RewardModelSpec
from tasks.checks.preferences import before_start, check_preferences, is_trained
from tasks.prefect.crashed_runs import holder_note, page_is_open
from tasks.prefect.deployment_params import is_deployed, is_part, requested
from tasks.prefect.server import page_url
from tasks.prefect.store_outages import report_outages
from tasks.preferences.context import PreferenceContext, with_commits_of
from tasks.runs.kept import keep
from tasks.runs.progress import ProgressFile
from tasks.stages.context import open_run_context
from tasks.stages.download_source import download_sources
from tasks.stages.early_engines import SCORING_ALONE
from tasks.stages.holding import lease_name
from tasks.stages.references import DownloadRef

C = TypeVar("C", bound=PreferenceContext)


class PreferenceReport(BaseModel):
    """What a finished training leaves; `version` is None where MLflow's registry did not answer."""

    model_config = ConfigDict(frozen=True)

    run: str
    metrics: dict[str, float]
    folder: Path
    artifact: str
    version: str | None
    complaints: list[str]


def check_called(
    spec: RewardModelSpec | DpoSpec, run: str | None = None, wait: bool = False, overrides: list[str] | None = None
) -> None:
    """What calling such a flow does before a Prefect server starts; raises what `check_preferences` raises, and
    SpecError."""
    spec, run = requested(spec, run, overrides)
    check_preferences(spec, run, wait=wait)


@contextmanager
def report_if_replaced(console: RunConsole, folder: Path) -> Iterator[None]:
    """Around the export of a model: where the folder had another one, which specs may name, say so."""
    before = exported_from(folder)
    yield
    now = exported_from(folder)
    if before is not None and now is not None and before.digest != now.digest:
        console.say(
            f"! {folder} had another model of this run, {before.digest[:12]}; now it is {now.digest[:12]} "
            "(registered versions stay as they are; --run NAME gives another setting a folder of its own)"
        )


@contextmanager
def preference_run(
    kind: type[C], spec: RewardModelSpec | DpoSpec, run: str, title: str, *, wait: bool
) -> Iterator[tuple[C, RunConsole, list[DownloadRef]]]:
    """A run's means, its console, and what was downloaded for it, which is kept from then on."""
    console = RunConsole(run, 0, file=ProgressFile(run))
    with report_outages(console.say):
        unchecked = is_deployed() and not is_part()  # whatever calls it has checked the data, as commands do
        for note in check_preferences(spec, run, wait=wait).notes if unchecked else before_start(spec, run):
            console.say(note)
    opened = open_run_context(
        kind,
        spec,
        run,
        console.progress,
        partial(with_commits_of, kind, run),
        held_as=lease_name(kind.flow, run),
        note=holder_note(),
        wait=wait,
        keep=lambda: not page_is_open(),
    )
    with console, report_outages(console.say), opened as context:
        context.engines.start(SCORING_ALONE if is_trained(spec, run) else None)
        console.step(f"{title} {run}; Prefect page {page_url()} (flow {kind.flow})")
        clean_up(context, console)
        downloads = download_sources(context)
        for download in downloads:
            console.say(download.in_words())
        if downloads:
            keep(context.store.root, run, [download.bare() for download in downloads], kind.kept_by)
        yield context, console, downloads
