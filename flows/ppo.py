"""PPO training as a flow. One iteration:

    checkpoint k ─► generate_rollouts ─► score_rollouts ─► compute_advantages ─► update_policy ─► checkpoint k+1
                                                                                      │
              report ◄─ commit_iteration (the record: the truth of the run) ◄─ evaluate_policy

Every stage is a task over stored artifacts. Killed anywhere and started again under the same run name, the flow goes on
after its last record, and finds the finished stages of the broken iteration in the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flows.ahead import Ahead, sampling_ahead
from flows.console import RunConsole
from flows.iteration import Rerun, begin, iterate
from flows.recovery import clean_up, last_resumable_record, rerun_iterations, tell_other_data
from infra.artifacts import ArtifactCorrupted, ArtifactMissing
from ppo_core.spec import RunSpec
from tasks.checks.machine import machine_notes
from tasks.checks.run import check_asked, check_deployed
from tasks.prefect.crashed_runs import FLOW_RUN, holder_note, page_is_open
from tasks.prefect.deployment_params import requested, shown_name
from tasks.prefect.flow_tags import tag_run
from tasks.prefect.server import EmbeddedFlow, page_url
from tasks.prefect.store_outages import at_once, report_outages, stop_waiting
from tasks.prepare_dataset import prepare_dataset
from tasks.register_policy import Registered, export_best, register_policy, usable_best
from tasks.report import begin_report, report, report_dataset, report_end
from tasks.runs.errors import FAILURES, RegistryError
from tasks.runs.guards import finish_rollback
from tasks.runs.iteration_record import IterationRecord, best_in_words
from tasks.runs.progress import ProgressFile
from tasks.runs.reachability import Reachability
from tasks.runs.retention import release
from tasks.runs.run_state import effective_spec, first_record, has_all, last_record, record_at, restore_lost
from tasks.stages.context import RunContext, open_run_context
from tasks.stages.download_source import download_sources
from tasks.stages.early_engines import SCORING_ALONE
from tasks.stages.references import DatasetRef

DAMAGES = 3
"""So often in a row artifacts are found damaged while an iteration works with them, before the run gives up."""


class RunReport(BaseModel):
    """What a finished run leaves."""

    model_config = ConfigDict(frozen=True)

    run: str
    iterations: int
    best_iteration: int
    best_value: float | None
    best: str
    policy: Registered | None
    policy_folder: Path
    metrics: dict[str, float]


def train(
    spec: RunSpec,
    run: str | None = None,
    wait: bool = False,
    rerun: Rerun | None = None,
    overrides: list[str] | None = None,
) -> RunReport:
    """Train a policy with PPO, or go on where the run of this name stopped.

    Args:
        spec: What to train, on what, and how
        run: Name of the run; a known one goes on. Without it, the spec's name, under a deployment with its start time
        wait: A run has one writer. Wait while another process has this one, instead of refusing
        rerun: Do an iteration of the run again from a stage on
        overrides: section.key=value over the spec, for example rollout.temperature=0.7
    """
    spec, run = requested(spec, run, overrides)
    console = RunConsole(run, spec.iterations, file=ProgressFile(run))
    with report_outages(console.say):
        again_from, flow_run = rerun.iteration if rerun else None, holder_note().get(FLOW_RUN)
        for note in check_deployed(spec, run, wait=wait, again_from=again_from, flow_run=flow_run):
            console.say(note)
    opened = open_run_context(
        RunContext,
        spec,
        run,
        console.progress,
        effective_spec,
        note=holder_note(),
        wait=wait,
        keep=lambda: not page_is_open(),
    )
    with console, report_outages(console.say), opened as context:
        console.step(f"run {context.run}; Prefect page {page_url()} (flow ppo-training)")
        finish_interrupted(context, console)
        record = last_record(context.records)
        start_engines(context, console, record, again=rerun is not None)
        begin_report(context, record, partial(tell, console), console.say)
        try:
            record = train_to_the_end(context, console, Reachability(context.store), rerun, flow_run)
            return finish(context, console, record)
        except BaseException:
            stop_waiting()
            leave_best(context, console)
            raise


def start_engines(context: RunContext, console: RunConsole, record: IterationRecord | None, *, again: bool) -> None:
    """Say where the run starts, or goes on, and what it does otherwise than its spec says; have engines start.

    `again`: an iteration that is done will be done again.
    """
    done = not again and has_all(context.spec, record)
    context.engines.start(SCORING_ALONE if done else None)
    for note in (*context.spec.notes(), *machine_notes(context.spec)):
        console.say(note)
    console.greet(record, done=done)


def train_to_the_end(
    context: RunContext,
    console: RunConsole,
    needs: Reachability,
    rerun: Rerun | None = None,
    flow_run: str | None = None,
) -> IterationRecord:
    """Get the data, and do every iteration that the run lacks; its last record."""
    for download in download_sources(context):
        console.say(download.in_words())
    dataset = prepare_dataset(context)
    tell_other_data(context, console, dataset)
    report_dataset(context, dataset)
    record = last_resumable_record(context, console)
    with showing(context, console) as show:
        record = rerun_iterations(context, console, dataset, record, rerun, show, flow_run=flow_run)
        return train_loop(show, dataset, record or begin_shown(show, dataset), needs)


def begin_shown(show: Show, dataset: DatasetRef) -> IterationRecord:
    """Record 0, and what its policy answers."""
    record = begin(show.context, dataset)
    show(record)
    show.console.samples("answers before PPO", record, record)
    return record


def finish_interrupted(context: RunContext, console: RunConsole) -> None:
    """Finish what holders of the run that died have left half done, and have Prefect's pages say that they died."""
    clean_up(context, console)
    for lost in restore_lost(context.records):
        console.say(lost)
    finish_rollback(context)


def train_loop(show: Show, dataset: DatasetRef, record: IterationRecord, needs: Reachability) -> IterationRecord:
    """Iterate up to the last iteration. What is found damaged on the way is made again; what no run needs is let go."""
    show.context.timings.iteration = record.iteration
    with sampling_ahead(show.context) as ahead:
        return iterate_to_the_end(show, dataset, record, needs, ahead)


def iterate_to_the_end(
    show: Show, dataset: DatasetRef, record: IterationRecord, needs: Reachability, ahead: Ahead
) -> IterationRecord:
    """See `train_loop`."""
    context, console, damages = show.context, show.console, 0
    while record.iteration < context.spec.iterations:
        try:
            after = iterate(context, console, dataset, record, ahead=ahead)
        except (ArtifactCorrupted, ArtifactMissing) as error:
            damages += 1
            console.say(f"! {error}")
            if damages == DAMAGES:
                raise
            ahead.settle()  # what is sampled has its engine to the end, which may be another one afterwards
            download_sources(context)
            dataset = prepare_dataset(context)
            report_dataset(context, dataset)
            record = last_resumable_record(context, console) or begin_shown(show, dataset)
            continue
        damages = 0
        if after.iteration > record.iteration:  # not rolled back
            show(after)
            release(context, needs)
            for whose, complaint in needs.unreadable.items():
                console.say_once(f"! what {whose} needs cannot be read, so no checkpoint is removed: {complaint}")
        record = after
    return record


def finish(context: RunContext, console: RunConsole, record: IterationRecord) -> RunReport:
    """Register the best policy and say where everything is. Without a registry the run is done all the same."""
    best = usable_best(context, record)
    try:
        registered = register_policy(context, record, best)
    except RegistryError as error:
        registered = None
        console.say(f"the policy is not registered: {error}; run the same command to retry, without training again")
    tell(console, report_end(context))
    folder = export_best(context, best)
    console.samples("answers after PPO", record, first_record(context.records))
    return RunReport(
        run=context.run,
        iterations=record.iteration,
        best_iteration=best.iteration,
        best_value=best.value,
        best=best_in_words(best, record_at(context.records, best.iteration).metrics),
        policy=registered,
        policy_folder=folder,
        metrics=record.metrics,
    )


@dataclass
class Show:
    """Tells people, Prefect and MLflow of a committed iteration. The best policy is copied beside the next one."""

    context: RunContext
    console: RunConsole
    beside: ThreadPoolExecutor
    copy: Future[None] | None = None

    def __call__(self, record: IterationRecord) -> None:
        self.console.iteration(record)
        if record.cached_stages:
            reused = ", ".join(record.cached_stages)
            self.console.say(f"iteration {record.iteration}: reused from the store: {reused}")
        tell(self.console, report(self.context, record))
        if record.best.iteration == record.iteration:
            self.wait()
            self.copy = self.beside.submit(copy_context().run, leave_best, self.context, self.console, record)

    def wait(self) -> None:
        """Until the last best policy is copied; raises what nobody expected of it."""
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.result()


@contextmanager
def showing(context: RunContext, console: RunConsole) -> Iterator[Show]:
    """Give what shows committed iterations; on the way out its last copy is waited for."""
    with ThreadPoolExecutor(1, thread_name_prefix="best-policy") as beside:
        show = Show(context, console, beside)
        yield show
        show.wait()


def leave_best(context: RunContext, console: RunConsole, record: IterationRecord | None = None) -> None:
    """The best policy that was committed lies in its folder, also however a run ends.

    Where that fails, it is said once: it ends no run, and does not hide why one ended. A store that is away is not
    waited for: the next copy does it again.
    """
    try:
        with at_once():
            last = record or last_record(context.records)
            if last is not None:
                export_best(context, usable_best(context, last))
    except (*FAILURES, OSError) as error:
        console.say_once(f"! the best policy could not be copied to the run's folder: {error}")


def tell(console: RunConsole, complaint: str | None) -> None:
    """Say once that a report is not complete: nothing is lost, the records have it all."""
    if complaint and complaint != console.complaint:
        console.say(f"{complaint}; nothing is lost: the rest is sent later, from the records")
    console.complaint = complaint


def check_called(
    spec: RunSpec,
    run: str | None = None,
    wait: bool = False,
    rerun: Rerun | None = None,
    overrides: list[str] | None = None,
) -> None:
    """What calling the flow does before a Prefect server starts; raises what `check_run` raises, and SpecError."""
    check_asked(*requested(spec, run, overrides), wait=wait, again_from=rerun.iteration if rerun else None)


ppo_training: EmbeddedFlow[[RunSpec, str | None, bool, Rerun | None, list[str] | None], RunReport] = EmbeddedFlow(
    fn=train,
    check=check_called,
    name="ppo-training",
    flow_run_name=shown_name,
    description="Train a language-model policy with PPO, from prompts to a registered model; resumes by run name.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
