"""The command line: each command starts a flow or reads records."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ppo_core.spec import RunSpec

app = typer.Typer(help="Train language-model policies with PPO as a restartable workflow.", no_args_is_help=True)
SpecPath = Annotated[Path, typer.Argument(help="A run's spec, a YAML file", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, any number of times")]
REFUSED, INTERRUPTED = 2, 130


@app.command()
def train(
    spec: SpecPath,
    run: Annotated[
        str | None, typer.Option(help="Name of the run; a known one goes on. Default: the spec's name")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a policy, or go on with the run of this name."""
    with told_clearly():
        loaded = RunSpec.from_yaml(spec, overrides or [])
        quiet_prefect()
        from flows.ppo import ppo_training
        from tasks.ending import ending, interrupted
        from tasks.errors import EngineError

        stop_on_sigterm()
        try:
            report = ppo_training(loaded, run)
        except KeyboardInterrupt:
            say(interrupted(run or loaded.name, again(spec, run, overrides)))
            raise typer.Exit(INTERRUPTED) from None
        except EngineError:
            say(f"what was finished is kept; go on with  {again(spec, run, overrides)}")
            raise
        say(ending(report, again(spec, run, overrides)))


@app.command()
def status(run: Annotated[str, typer.Argument(help="Name of the run")]) -> None:
    """Show where a run stands, from its records."""
    with told_clearly():
        from flows.console import records_table
        from tasks.inspect_run import read_run

        found = read_run(run)
        console = Console()
        console.print(records_table(run, found.records, found.iterations, console.width))
        say(found.summary())


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="A run's name, models:/NAME@ALIAS, or a Hugging Face folder")],
    prompt: Annotated[str, typer.Argument(help="What the policy shall answer")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of answers")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    chat: Annotated[bool, typer.Option(help="Ask through the chat template, for policies of messages")] = False,
) -> None:
    """Ask a trained policy, through the rollout engine."""
    with told_clearly():
        from tasks.sample_policy import sample_policy

        for answer in sample_policy(
            model, prompt, temperature=temperature, max_tokens=max_tokens, count=count, seed=seed, chat=chat
        ):
            say(answer)


@app.command()
def reward(
    spec: SpecPath,
    completion: Annotated[list[str] | None, typer.Option(help="Completions to score, in turn over the rows")] = None,
    overrides: Overrides = None,
) -> None:
    """Try the spec's reward functions on five rows, without a model."""
    with told_clearly():
        loaded = RunSpec.from_yaml(spec, overrides or [])
        from tasks.try_reward import complaints, try_reward

        rows = try_reward(loaded, completion or [])
        table = Table(
            "prompt", "completion", *rows[0].components, "score", title=f"rewards of {spec}", title_justify="left"
        )
        for row in rows:
            table.add_row(*row.cells())
        Console().print(table)
        problems = complaints(rows)
        for problem in problems:
            say(f"! {problem}")
        if problems:
            raise typer.Exit(1)


@contextmanager
def told_clearly() -> Iterator[None]:
    """Show what went wrong as a message, not as a traceback; the exit status is 2."""
    from tasks.errors import FAILURES

    try:
        yield
    except FAILURES as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None


def say(text: str) -> None:
    """A text as it is."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def again(spec: Path, run: str | None, overrides: list[str] | None) -> str:
    """The command that goes on with this run."""
    options = [part for text in overrides or [] for part in ("--set", text)]
    return shlex.join(["ppoflow", "train", str(spec), *(["--run", run] if run else []), *options])


def stop_on_sigterm() -> None:
    """End on SIGTERM as on Ctrl-C: Prefect then marks the run Crashed, and everything is closed."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handler: Callable[..., Any] = interrupt
    signal.signal(signal.SIGTERM, handler)


def quiet_prefect() -> None:
    """The console belongs to the run's table; Prefect's log lines go to its page."""
    from tasks.prefect_environment import prepare

    prepare()


if __name__ == "__main__":
    app()
