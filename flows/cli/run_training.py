"""How a command starts training: it checks first, trains, and says how that ended and how to go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import typer

from flows.cli.friendly_errors import (
    INTERRUPTED,
    REFUSED,
    interrupting,
    leave,
    say,
    stopping_on_sigterm,
    unwrapped_interrupts,
    with_set,
)
from flows.starting import tell_step
from ppo_core.spec import RunSpec

if TYPE_CHECKING:
    from flows.iteration import Rerun
    from tasks.checks.run import Findings, KeptEngine

CHECKING = "checking the spec, its data, rewards and model"


def check_first(spec: RunSpec, run: str | None, *, wait: bool = False) -> None:
    """Refuse a training that cannot run before anything starts; see `pass_check`."""
    from tasks.checks.run import checking

    pass_check(checking(spec, run, wait=wait), run or spec.name, "tasks.reports.summary")


def pass_check(checking: AbstractContextManager[Future[Findings]], run: str, module: str) -> None:
    """Refuse what cannot run before anything starts, while a module with the slow libraries of the flow is imported.

    Not by the main thread, which Ctrl-C would interrupt in the middle of that; see `interrupt`.
    """
    from tasks.checks.threads import submit
    from tasks.runs.progress import announced

    tell_step(CHECKING)
    try:
        with (
            interrupting(),
            unwrapped_interrupts(),
            ThreadPoolExecutor(1) as aside,
            announced(run, CHECKING),
            checking as answer,
        ):
            submit(aside, import_module, module)
            findings = answer.result()
    except KeyboardInterrupt:
        say("interrupted; nothing was started")
        raise typer.Exit(INTERRUPTED) from None
    for note in findings.notes:
        say(note)


def tell_server() -> None:
    """Say which of Prefect's servers is asked, or that one is started."""
    from tasks.prefect.server import configured_url, shown_url

    tell_step(f"asking Prefect's server at {shown_url()}" if configured_url() else "starting Prefect's server")


def run_training(
    spec: RunSpec,
    run: str | None,
    again: Callable[[], str],
    *,
    wait: bool = False,
    rerun: Rerun | None = None,
    checked: bool = False,
) -> None:
    """Start the training flow, and report how it ended. `again` gives the command that goes on with it then."""
    from tasks.checks.run import keeping_check_engine

    with keeping_check_engine() as kept:
        if not checked:
            check_first(spec, run, wait=wait)
        train_checked(spec, run, again, kept, wait=wait, rerun=rerun)


def train_checked(
    spec: RunSpec,
    run: str | None,
    again: Callable[[], str],
    kept: KeptEngine,
    *,
    wait: bool = False,
    rerun: Rerun | None = None,
) -> None:
    """See `run_training`; the engine of the check goes on as the run's."""
    from flows.ppo import ppo_training
    from tasks.prefect.server import PREFECT_AWAY, no_answer
    from tasks.reports.summary import interrupted, run_summary
    from tasks.runs.errors import EngineError, StoreUnavailable
    from tasks.runs.inspect import Completion
    from tasks.runs.progress import announced
    from tasks.stages.early_engines import SCORING_ALONE, started_early

    tell_server()
    name, asked = run or spec.name, None if rerun is None else (rerun.iteration, str(rerun.start))
    try:
        before = Completion.of(spec, name, asked)
        only = SCORING_ALONE if rerun is None and before.is_done else None
        # Whoever waits keeps no memory from others.
        early = nullcontext() if wait else started_early(spec, name, kept.engine, only=only)
        with stopping_on_sigterm(), announced(name, "starting"), early:
            kept.closing.close()
            report = ppo_training.checked(spec, run, wait, rerun)
    except KeyboardInterrupt:
        say(interrupted(name, again()))
        raise typer.Exit(INTERRUPTED) from None
    except PREFECT_AWAY as error:
        say(no_answer(error))
        say("its page will not show how this run ended")
        leave_without_prefect(name, again, lambda: Completion.of(spec, name, asked).reached_since(before))
    except (EngineError, StoreUnavailable):
        say(f"finished work is kept; continue with  {again()}")
        raise
    say(run_summary(report, with_set(again(), f"iterations={report.iterations + 10}")))


def leave_without_prefect(run: str, again: Callable[[], str], came_to_its_end: Callable[[], bool]) -> NoReturn:
    """Say where a run stands whose Prefect server is gone, and end: with 0 if it came to its end since this command
    began, so that the report of that is all that is missing."""
    from tasks.prefect.store_outages import at_once
    from tasks.runs.errors import InputError, StoreUnavailable
    from tasks.runs.inspect import read_run

    try:
        with at_once():
            said, ended = read_run(run).summary(), came_to_its_end()
    except InputError:
        say(f"run {run}: no iteration was committed\n  once it answers    {again()}")
        leave(REFUSED)
    except StoreUnavailable as away:
        say(f"nor does the store: {away}\n  once both answer   {again()}")
        leave(REFUSED)
    say(f"{said}\n  continue           {again()}")
    leave(0 if ended else REFUSED)
