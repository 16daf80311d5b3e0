"""The command line's application, which the modules of commands add to, and the options that they share."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Set a key of the spec, section.key=value; repeatable")
]
Wait = Annotated[bool, typer.Option("--wait", help="If another process has the run, wait for it instead of failing")]
Folder = Annotated[str | None, typer.Option(help="The spec's folder (with data and reward functions), if it has moved")]


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        typer.echo(f"ppoflow {version('ppoflow')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Train language-model policies with PPO as a restartable workflow.

    How to begin: README.md, section "Your own data, model and reward".
    """
