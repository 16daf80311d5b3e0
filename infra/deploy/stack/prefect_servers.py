"""Prefect's server, and the worker that runs what the server schedules."""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

from infra.deploy.stack.postgres import create_database
from infra.deploy.stack.probes import answers, ask
from infra.deploy.stack.service import Port, Service, StackError
from infra.deploy.stack.site import Site, worker_home

WORKER = "stack"
QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


def server(site: Site) -> Service:
    """API and UI on one port, with PostgreSQL below."""
    home = site.folder("prefect")
    listen = ["--host", site.host, "--port", str(site.settings.prefect_port)]
    application = ["prefect.server.api.server:create_app", "--factory", "--log-level", "warning", "--no-access-log"]
    login = {} if site.login is None else {"PREFECT_SERVER_API_AUTH_STRING": site.login}
    return Service(
        name="prefect",
        address=site.prefect_url,
        ports=[Port(site.host, site.settings.prefect_port, "PREFECT_PORT")],
        after=["postgres"],
        command=[sys.executable, "-m", "uvicorn", *application, *listen],
        folder=home,
        environment={
            **QUIET,
            **login,
            **_ui_folder(home),
            **_client(site),
            **site.database_environment(),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": site.database(
                "prefect", driver="asyncpg", sqlite="sqlite+aiosqlite"
            ),
            "PREFECT_SERVER_UI_API_URL": f"{site.prefect_url}/api",
        },
        prepare=lambda: create_database(site, "prefect"),
        healthy=lambda: answers(f"{site.prefect_url}/api/health"),
        furnish=lambda: _create_pool(site),
    )


def worker(site: Site) -> Service:
    """Runs flows of the work pool as processes of this machine, below itself."""
    here = Path.cwd()
    start = ["worker", "start", "--pool", site.settings.pool, "--type", "process", "--name", WORKER]
    return Service(
        name="worker",
        address=f"pool {site.settings.pool}",
        after=["prefect", "s3", "mlflow"],
        command=[sys.executable, "-m", "prefect", *start, "--install-policy", "never"],
        # What a deployment calls "here" is where the stack was started.
        folder=here,
        environment={**QUIET, **_client(site), **site.client_environment(), "PPOFLOW_HOME": str(worker_home())},
        prepare=lambda: _forget_worker(site),
        healthy=lambda: _worker_is_online(site),
        grace_s=35.0,  # it gives its flow runs 30 s to end
    )


def _client(site: Site) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(site.folder("prefect")),
        "PREFECT_PROFILE": "ephemeral",  # Prefect brings it along; one of the user's is not in our folder
        "PREFECT_API_URL": f"{site.prefect_url}/api",
        "PREFECT__SERVER_EPHEMERAL": "",
    }


def _ui_folder(home: Path) -> dict[str, str]:
    """Prefect unpacks its UI into its own package; where that is not ours to write, into our folder."""
    package = find_spec("prefect")
    if package is not None and package.origin and os.access(Path(package.origin).parent / "server", os.W_OK):
        return {}
    return {"PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui")}


def _create_pool(site: Site) -> None:
    """One flow run at a time: the pool stands for this machine's GPUs."""
    pool = {"name": site.settings.pool, "type": "process", "base_job_template": {}, "concurrency_limit": 1}
    status, said = ask(f"{site.prefect_url}/api/work_pools/", method="POST", body=pool, login=site.login)
    if status not in (HTTPStatus.CREATED, HTTPStatus.CONFLICT):
        raise StackError(f"Prefect at {site.prefect_url} did not make the work pool {pool['name']!r}: {status} {said}")


def _forget_worker(site: Site) -> None:
    """Else the one of before would count as online for a while yet."""
    ask(f"{_workers(site)}/{WORKER}", method="DELETE", login=site.login)


def _worker_is_online(site: Site) -> bool:
    status, found = ask(f"{_workers(site)}/filter", method="POST", body={}, login=site.login)
    if status != HTTPStatus.OK:
        return False
    return any(one["name"] == WORKER and one["status"] == "ONLINE" for one in found)


def _workers(site: Site) -> str:
    return f"{site.prefect_url}/api/work_pools/{site.settings.pool}/workers"
