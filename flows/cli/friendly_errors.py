"""How commands talk to people: plain text, errors as messages, and how a training run ends."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from flows.starting import begin, tell_step
from ppo_core.spec import RunSpec

if TYPE_CHECKING:
    from flows.ppo import Rerun

REFUSED, INTERRUPTED = 2, 130
CHECKING = "checking the spec, its data, rewards and model"


def check_first(spec: RunSpec, run: str | None, *, wait: bool = False) -> None:
    """Refuse what cannot run before anything starts, while the slow libraries of the flow are imported."""
    from tasks.checks.run import checking
    from tasks.runs.progress import announced

    tell_step(CHECKING)
    try:
        with unwrapped_interrupts(), announced(run or spec.name, CHECKING), checking(spec, run, wait=wait) as answer:
            import tasks.reports.summary  # noqa: F401

            findings = answer.result()
    except KeyboardInterrupt:
        say("interrupted; nothing was started")
        raise typer.Exit(INTERRUPTED) from None
    for note in findings.notes:
        say(note)


def run_training(
    spec: RunSpec, run: str | None, again: str, *, wait: bool = False, rerun: Rerun | None = None, checked: bool = False
) -> None:
    """Start the training flow, and report how it ended. `again`: the command that goes on with it."""
    if not checked:
        check_first(spec, run, wait=wait)
    from flows.ppo import ppo_training
    from tasks.prefect.server import PREFECT_AWAY, configured_url, shown_url
    from tasks.prefect.store_outages import at_once
    from tasks.reports.summary import interrupted, run_summary
    from tasks.runs.errors import EngineError, InputError, StoreUnavailable
    from tasks.runs.inspect import read_run
    from tasks.runs.progress import announced
    from tasks.stages.early_engines import started_early

    tell_step(f"asking Prefect's server at {shown_url()}" if configured_url() else "starting Prefect's server")
    try:
        name = run or spec.name
        early = nullcontext() if wait else started_early(spec, name)  # whoever waits keeps no memory from others
        with stopping_on_sigterm(), announced(name, "starting"), early:
            report = ppo_training.checked(spec, run, wait, rerun)
    except KeyboardInterrupt:
        say(interrupted(run or spec.name, again))
        raise typer.Exit(INTERRUPTED) from None
    except PREFECT_AWAY as error:
        say(f"Prefect's server at {shown_url()} fails or does not answer ({error})")
        say("its page will not show how this run ended")
        try:
            with at_once():
                done = read_run(run or spec.name)
        except InputError:
            say(f"run {run or spec.name}: no iteration was committed\n  once it answers    {again}")
            leave(REFUSED)
        except StoreUnavailable as away:
            say(f"nor does the store: {away}\n  once both answer   {again}")
            leave(REFUSED)
        say(f"{done.summary()}\n  continue           {again}")
        leave(0 if done.records[-1].iteration >= spec.iterations else REFUSED)
    except (EngineError, StoreUnavailable):
        say(f"finished work is kept; continue with  {again}")
        raise
    say(run_summary(report, with_set(again, f"iterations={report.iterations + 10}")))


@contextmanager
def ending_well(again: str) -> Iterator[None]:
    """Around a flow that goes on where it stopped, by the command `again`: what people are told where it is cut off."""
    from tasks.prefect.server import PREFECT_AWAY, shown_url
    from tasks.runs.errors import EngineError, StoreUnavailable

    try:
        with stopping_on_sigterm():
            yield
    except KeyboardInterrupt:
        say(f"interrupted; finished work is kept; continue with  {again}")
        raise typer.Exit(INTERRUPTED) from None
    except PREFECT_AWAY as error:
        say(f"Prefect's server at {shown_url()} fails or does not answer ({error})")
        say(f"finished work is kept; continue with  {again}")
        leave(REFUSED)
    except (EngineError, StoreUnavailable):
        say(f"finished work is kept; continue with  {again}")
        raise


@contextmanager
def friendly_errors(starting: str | None = None) -> Iterator[None]:
    """Show what went wrong as a message, not as a traceback; the exit status is 2.

    `starting` is what a command that takes time says first.
    """
    if starting is not None:
        begin(starting)
    try:
        quiet_prefect()  # before anything imports it
        from tasks.runs.errors import FAILURES
        from tasks.runs.state_folder import require_readable_state, unknown_variables

        try:
            require_readable_state()
            for line in unknown_variables():
                print(f"! {line}", file=sys.stderr)
            with unwrapped_interrupts():
                yield
        except FAILURES as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def say(text: str) -> None:
    """A text as it is."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def leave(status: int) -> NoReturn:
    """End at once: what waits to be told to a server that is gone would hold the process for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def command_line(*arguments: str) -> str:
    """`ppoflow …` as it can be pasted."""
    return shlex.join(["ppoflow", *arguments])


def set_options(overrides: list[str] | None) -> list[str]:
    """`--set` options as they were given; of one key the last one counts, and stands alone."""
    last = {text.partition("=")[0]: text for text in overrides or []}
    return [part for text in last.values() for part in ("--set", text)]


def with_set(command: str, override: str) -> str:
    """A command line with this `--set` option, in place of any other for its key."""
    words = shlex.split(command)
    given = [text for flag, text in pairwise(words) if flag == "--set"]
    plain = words[: words.index("--set")] if given else words
    return shlex.join([*plain, *set_options([*given, override])])


@contextmanager
def unwrapped_interrupts(*others: type[BaseException]) -> Iterator[None]:
    """Raise KeyboardInterrupt for an error that has it, or one of `others`, as its cause.

    Libraries make classes for seconds while they are imported; Python 3.11 makes a RuntimeError of a Ctrl-C that comes
    while it calls `__set_name__`.
    """
    try:
        yield
    except Exception as error:
        from tasks.runs.errors import behind

        if behind(error, KeyboardInterrupt, *others) is None:
            raise
        raise KeyboardInterrupt from error


@contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: Prefect then marks the run Crashed, and everything is closed.

    Where SIGTERM comes while Prefect makes a task run, its own handling of the signal fails with a ValueError: an error
    that a signal was made into is KeyboardInterrupt here too.
    """
    from prefect.exceptions import TerminationSignal

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handler: Callable[..., Any] = interrupt
    signal.signal(signal.SIGTERM, handler)
    with unwrapped_interrupts(TerminationSignal):
        yield


def quiet_prefect() -> None:
    """The console belongs to the run's table; Prefect's log lines go to its page."""
    from tasks.prefect.environment import prepare

    prepare()
