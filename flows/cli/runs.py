"""Commands on runs that exist: go on, fork, do a stage again, verify, and make preferences of their samples."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.application import Folder, Overrides, Wait, app
from flows.cli.friendly_errors import (
    command_line,
    folder_option,
    friendly_errors,
    interrupting,
    say,
    set_options,
    stopping_on_sigterm,
)
from flows.cli.run_training import check_first, run_training

Iterations = Annotated[str | None, typer.Option(help="FIRST..LAST or one number. Default: all")]
Place = Annotated[str, typer.Argument(help="RUN@ITERATION, for example demo@12", show_default=False)]
DIFFERS = 1


@app.command(rich_help_panel="Runs that exist")
def resume(
    run: Annotated[str, typer.Argument(help="Name of the run", show_default=False)],
    overrides: Overrides = None,
    folder: Folder = None,
    wait: Wait = False,
) -> None:
    """Resume a run by its name alone; the spec comes from its records."""
    with friendly_errors(f"run {run}"):
        from tasks.runs.run_state import spec_to_go_on

        spec = spec_to_go_on(run, folder).with_overrides(overrides or [])
        again = partial(command_line, "resume", run, *folder_option(folder), *set_options(overrides))
        run_training(spec, run, again, wait=wait)


@app.command(rich_help_panel="Runs that exist")
def fork(
    place: Place,
    new: Annotated[str, typer.Argument(help="Name of the new run", show_default=False)],
    overrides: Overrides = None,
    folder: Folder = None,
    only_create: Annotated[bool, typer.Option("--only-create", help="Create the run without training yet")] = False,
) -> None:
    """Start a new run from an iteration of another one, with other settings; what came before is shared, not copied."""
    with friendly_errors(None if only_create else f"run {new} from {place}"):
        from tasks.runs.fork import comparable, fork_run, fork_spec, parse_place
        from tasks.runs.run_state import committed_at

        source, iteration = parse_place(place)
        check_first(fork_spec(source, iteration, new, overrides or [], folder), new)
        spec = fork_run(source, iteration, new, overrides or [], folder)
        say(f"run {new} shares iterations 0 to {iteration} of {source}")
        given = committed_at(source, iteration)
        if not comparable([committed_at(new, iteration)], spec, spec):
            say("  best policy        chosen among its own iterations: the scores of the shared ones do not compare")
        if given.attempt:
            rolled_back = f"{given.attempt} rollbacks of {source} count as its own"
            say(f"  learning rates     times {given.rate_factor:g}: {rolled_back}")
        if only_create:
            say(f"  continue           ppoflow resume {new}")
        else:
            run_training(spec, new, partial(command_line, "resume", new), checked=True)


@app.command(rich_help_panel="Runs that exist")
def rerun(
    place: Place,
    start: Annotated[
        str,
        typer.Option(
            "--from", help="First stage to rerun: generate, score, advantages, update or evaluate", show_default=False
        ),
    ],
    folder: Folder = None,
    wait: Wait = False,
) -> None:
    """Rerun an iteration from one of its stages on, and keep the stages before it (such as the samples).

    A stage of which nothing that the store knows has changed is found there, and not computed again.
    """
    with friendly_errors(f"run {place.partition('@')[0]}, again from stage {start}"):
        from pydantic import ValidationError

        from flows.iteration import Rerun
        from tasks.runs.errors import FAILURES, InputError
        from tasks.runs.fork import parse_place
        from tasks.runs.inspect import reruns_done
        from tasks.runs.run_state import require_rerunnable, spec_to_go_on
        from tasks.stages.table import ITERATION

        run, iteration = parse_place(place)
        try:
            wanted = Rerun.model_validate({"iteration": iteration, "start": start})
        except ValidationError:
            stages = [stage.label for stage in ITERATION]
            known = start in stages
            remedy = "give an iteration from 1 on" if known else f"choose one of {', '.join(stages)}"
            raise InputError(f"{place if known else f'--from {start}'}: {remedy}") from None
        spec = spec_to_go_on(run, folder)
        require_rerunnable(run, iteration)
        before = reruns_done(run, iteration, start)

        def again() -> str:
            """Until it is done, the rerun itself; of a run that cannot be read now, nobody knows."""
            from tasks.prefect.store_outages import at_once

            try:
                with at_once():
                    done = reruns_done(run, iteration, start) > before
            except FAILURES:
                done = True
            words = ("resume", run) if done else ("rerun", place, "--from", start)
            return command_line(*words, *folder_option(folder))

        run_training(spec, run, again, wait=wait, rerun=wanted)


@app.command(rich_help_panel="Runs that exist")
def verify(
    run: Annotated[str, typer.Argument(help="Name of the run", show_default=False)],
    iterations: Iterations = None,
    folder: Folder = None,
) -> None:
    """Recompute iterations from their recorded inputs, and compare the digests. Exit status 1: a stage differs."""
    with friendly_errors():
        from tasks.runs.verification import require_verifiable

        require_verifiable(run, iterations, folder)  # before Prefect's server is started
        from flows.verify import verify_run

        with stopping_on_sigterm():
            report = verify_run(run, iterations, folder)
        different = report.first_difference
        if different is None:
            say(f"run {run}: all {len(report.comparisons)} stages reproduced the recorded bytes")
            return
        say(
            f"run {run}: iteration {different.iteration}, stage {different.stage} is the first that differs: recorded "
            f"{different.recorded}, found {different.found}. Either the record is wrong, or code, library versions, "
            "type of CPU or number of threads have changed since it was made"
        )
        raise typer.Exit(DIFFERS)


@app.command(rich_help_panel="Runs that exist")
def preferences(
    run: Annotated[str, typer.Argument(help="Name of the run", show_default=False)],
    output: Annotated[Path, typer.Option(help="File to write, JSON lines; refused if it exists", show_default=False)],
    iterations: Iterations = None,
) -> None:
    """Write preference pairs for DPO or a reward model: of each prompt the best-scored sample against the worst."""
    with friendly_errors(), interrupting():
        from tasks.preferences.from_samples import write_pairs

        say(f"{output}: {write_pairs(run, output, iterations).in_words()}")
