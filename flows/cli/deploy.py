"""The command that makes a Prefect server ready for ppoflow's deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.application import app
from flows.cli.friendly_errors import REFUSED, friendly_errors, say

DEPLOYMENTS = "prefect.yaml"


@app.command(rich_help_panel="A team's servers")
def deploy(
    pool: Annotated[
        str | None, typer.Option(help="A work pool for all deployments, in place of those that prefect.yaml names")
    ] = None,
    only_server: Annotated[
        bool, typer.Option("--only-server", help="Create pool and automations only, no deployments")
    ] = False,
) -> None:
    """Create the work pool and the automations on the configured Prefect server, and deploy all of prefect.yaml.

    Running it again keeps the pool, and which automations are switched on; deployments and automations are made anew.
    """
    with friendly_errors():
        from tasks.prefect.automations import POOL, prepare_server
        from tasks.prefect.deploying import deploy_all
        from tasks.prefect.server import configured_url, prefect_api
        from tasks.runs.errors import InputError

        url = configured_url()
        if not url:
            raise InputError(
                "no Prefect server is configured: set PREFECT_API_URL to its address, http://HOST:PORT/api"
            )
        if not only_server and not Path(DEPLOYMENTS).is_file():
            raise InputError(
                f"there is no {DEPLOYMENTS} here: run this in a checkout of ppoflow, or with --only-server"
            )
        with prefect_api():
            for line in prepare_server(pool or POOL):
                say(line)
        if not only_server:
            raise typer.Exit(REFUSED if deploy_all(Path(DEPLOYMENTS), pool, url) else 0)
