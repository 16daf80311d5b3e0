"""The command line's application, which the modules of commands add to, and the options that they share."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(no_args_is_help=True)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Set a key of the spec, section.key=value; repeatable")
]
Wait = Annotated[bool, typer.Option("--wait", help="If another process has the run, wait for it instead of failing")]
Folder = Annotated[str | None, typer.Option(help="The spec's folder (with data and reward functions), if it has moved")]


class TakesText(TyperCommand):
    """A command with an argument that may be any text: who begins one with a dash is told how."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left."""
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            if not str(error).startswith("No such option"):
                raise
            raise typer.BadParameter(f"{error}. Before a text that begins with a dash write --", ctx) from None


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
