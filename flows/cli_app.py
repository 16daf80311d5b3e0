"""The command line's application, which the modules of commands add to, and the options that they share."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Train language-model policies with PPO as a restartable workflow.", no_args_is_help=True)

Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, any number of times")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait while another process has the run, instead of refusing")]
Folder = Annotated[
    str | None, typer.Option(help="Where the spec's folder (data, reward functions) is now, if it has moved")
]
