"""The command that makes a Prefect server ready for ppoflow's deployments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.application import app
from flows.cli.friendly_errors import friendly_errors, say

DEPLOYMENTS = "prefect.yaml"


@app.command(rich_help_panel="A team's servers")
def deploy(
    pool: Annotated[str, typer.Option(help="Name of the work pool, as in prefect.yaml")] = "gpu",
    only_server: Annotated[
        bool, typer.Option("--only-server", help="Create pool and automations only, no deployments")
    ] = False,
) -> None:
    """Create the work pool and the automations on the configured Prefect server, and deploy all of prefect.yaml.

    Running it again keeps what was set in the UI, except for the deployments themselves.
    """
    with friendly_errors():
        from tasks.prefect.automations import prepare_server
        from tasks.prefect.server import configured_url, prefect_api
        from tasks.runs.errors import InputError

        if not configured_url():
            raise InputError(
                "no Prefect server is configured: set PREFECT_API_URL to its address, http://HOST:PORT/api"
            )
        if not only_server and not Path(DEPLOYMENTS).is_file():
            raise InputError(
                f"there is no {DEPLOYMENTS} here: run this in a checkout of ppoflow, or with --only-server"
            )
        with prefect_api():
            for line in prepare_server(pool):
                say(line)
        if not only_server:
            command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
            raise typer.Exit(subprocess.run(command, check=False).returncode)
