"""The command line: each command starts a flow or reads records."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flows.cli import deploy, preferences, registry, runs, store
from flows.cli.application import Overrides, TakesText, Wait, app
from flows.cli.friendly_errors import friendly_errors, leaving_soon, no_verdict_by_accident, say
from flows.cli.run_training import run_training
from ppo_core.spec import RlhfSpec, RunSpec
from ppo_core.spec.kinds import load_any, load_as
from ppo_core.spec.rlhf import REWARD_MODEL

__all__ = ["app", "deploy", "preferences", "registry", "runs", "store"]

SpecPath = Annotated[Path, typer.Argument(help="Spec of the run, a YAML file", show_default=False)]
AnySpecPath = Annotated[
    Path, typer.Argument(help="Spec for train, reward-model, dpo or rlhf, a YAML file", show_default=False)
]


@app.command()
def train(
    spec: SpecPath,
    run: Annotated[
        str | None, typer.Option(help="Name of the run; one that exists is resumed. Default: the spec's name")
    ] = None,
    overrides: Overrides = None,
    wait: Wait = False,
) -> None:
    """Train a policy, or resume the run of this name."""
    with friendly_errors(f"run {run} from {spec}" if run else f"a run from {spec}"):
        loaded = load_as(RunSpec, spec, overrides or [])
        run_training(loaded, run, partial(again, spec, run, overrides), wait=wait)


@app.command()
def check(
    spec: AnySpecPath,
    run: Annotated[str | None, typer.Option(help="Name of the run. Default: the spec's name")] = None,
    overrides: Overrides = None,
) -> None:
    """Check in seconds whether a run can start: data, rewards, model, context length, disk. Starts nothing.

    Exit status 2: it cannot.
    """
    with friendly_errors():
        loaded = load_any(spec, overrides or [])
        from tasks.checks.any_spec import check_any

        found = check_any(loaded, run)
        for subject, text in found.good.items():
            say(f"{subject:<9} {text}")
        for note in found.notes:
            say(f"! {note}")


@app.command()
def download(spec: AnySpecPath, overrides: Overrides = None) -> None:
    """Download what a spec names on the Hugging Face Hub (hf://…) into the store, and print the commits."""
    with friendly_errors():
        loaded = load_any(spec, overrides or [])
        from tasks.stages.download_source import download_ahead

        # A reward model that is made on the way, or registered, is no name of the hub.
        parts = (
            (loaded.trained, loaded.run_with(loaded.given.reward_model or REWARD_MODEL, None))
            if isinstance(loaded, RlhfSpec)
            else (loaded,)
        )
        found = [download_ahead(part, say) for part in parts if part is not None]
        if not any(found):
            say(f"{spec} names nothing of the Hugging Face Hub (hf://…)")


@app.command()
def status(run: Annotated[str, typer.Argument(help="Name of the run")]) -> None:
    """Show the progress of a run, and what its process is doing now."""
    with friendly_errors():
        from flows.console import records_table
        from tasks.runs.inspect import read_status

        found, now = read_status(run)
        if found is not None:
            console = Console()
            console.print(records_table(run, found.records, found.iterations, console.width))
            say(found.summary())
        for line in now:
            say(line)


@app.command(cls=TakesText)
def sample(
    model: Annotated[str, typer.Argument(help="RUN, RUN@ITERATION, models:/NAME@ALIAS, or a Hugging Face folder")],
    prompt: Annotated[str, typer.Argument(help="Prompt to answer; before one that begins with a dash write --")],
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens")] = 64,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of answers")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling")] = 0,
    chat: Annotated[bool, typer.Option(help="Apply the chat template to the prompt")] = False,
) -> None:
    """Sample answers from a trained policy, with the rollout engine."""
    with friendly_errors():
        from tasks.policies.sample_policy import sample_policy

        for answer in sample_policy(
            model, prompt, temperature=temperature, max_tokens=max_tokens, count=count, seed=seed, chat=chat
        ):
            say(answer)


@app.command()
def reward(
    spec: SpecPath,
    completion: Annotated[
        list[str] | None, typer.Option(help="Completion to score instead of the trial ones; repeatable, used in turn")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Try the spec's rewards on five rows, without a policy."""
    with friendly_errors():
        loaded = load_as(RunSpec, spec, overrides or [])
        from tasks.checks.try_reward import complaints, try_reward

        rows = try_reward(loaded, completion or [])
        table = Table(
            "prompt", "completion", *rows[0].components, "score", title=f"rewards of {spec}", title_justify="left"
        )
        for row in rows:
            table.add_row(*row.cells())
        Console(markup=False, emoji=False).print(table)  # a text may hold [/INST]
        problems = complaints(rows)
        for problem in problems:
            say(f"! {problem}")
        if problems:
            raise typer.Exit(1)


def again(spec: Path, run: str | None, overrides: list[str] | None) -> str:
    """The command that goes on with this run."""
    return preferences.goes_on_by("train", spec, run, overrides)


@leaving_soon()
@no_verdict_by_accident()
def run() -> None:
    """`ppoflow` as a program."""
    # Prefect and MLflow make some 300,000 objects that stay: to look for garbage among them, as often as Python does by
    # itself, takes a fifth of the time of importing them.
    gc.set_threshold(50_000, 20, 50)
    app()
