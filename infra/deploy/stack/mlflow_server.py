"""MLflow's server: tables in PostgreSQL, artifacts in S3 through itself, a login for everyone."""

from __future__ import annotations

import configparser
import io
import sys

from infra.deploy.stack.credentials import ADMIN, write_private
from infra.deploy.stack.postgres import create_database
from infra.deploy.stack.probes import answers
from infra.deploy.stack.service import Port, Service
from infra.deploy.stack.site import LOOPBACK, Site


def mlflow_server(site: Site) -> Service:
    """Tracking and registry. Its clients need no keys for S3 but for our own artifacts."""
    folder = site.folder("mlflow")
    port = site.settings.mlflow_port
    artifacts = str(folder / "artifacts") if site.s3_endpoint is None else f"s3://{site.settings.mlflow_bucket}"
    # Against DNS rebinding it answers to no other name than these.
    names = ",".join(f"{host}:{port}" for host in dict.fromkeys((site.host, LOOPBACK, "localhost")))
    listen = ["--host", site.host, "--port", str(port), "--workers", "1", "--allowed-hosts", names]
    return Service(
        name="mlflow",
        address=site.mlflow_url,
        ports=[Port(site.host, port, "MLFLOW_PORT")],
        after=["postgres"],
        command=[
            *(sys.executable, "-m", "mlflow", "server", *listen, "--artifacts-destination", artifacts),
            *(("--app-name", "basic-auth") if site.settings.authentication else ()),
        ],
        folder=folder,
        environment={
            **site.s3_environment(),
            **site.database_environment(),
            **_login(site),
            # Not on the command line, which everyone can read: the user's own PostgreSQL may have a password in it.
            "MLFLOW_BACKEND_STORE_URI": site.database("mlflow", driver="psycopg2"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # a gigabyte for nothing of ours
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONUNBUFFERED": "1",
        },
        prepare=lambda: _prepare(site),
        healthy=lambda: answers(f"{site.mlflow_url}/health"),
    )


def _login(site: Site) -> dict[str, str]:
    if not site.settings.authentication:
        return {}
    configuration = str(site.secrets / "mlflow-auth.ini")
    return {"MLFLOW_AUTH_CONFIG_PATH": configuration, "MLFLOW_FLASK_SERVER_SECRET_KEY": site.credentials.mlflow_cookies}


def _prepare(site: Site) -> None:
    create_database(site, "mlflow")
    write_private(site.secrets / "mlflow-auth.ini", auth_configuration(site))


def auth_configuration(site: Site) -> str:
    """What MLflow reads of its logins, an ini file."""
    parser = configparser.ConfigParser(interpolation=None)
    settings = {
        "default_permission": "READ",
        "database_uri": site.database("mlflow", driver="psycopg2"),
        "admin_username": ADMIN,
        "admin_password": site.credentials.mlflow,
        # Checking a password takes 100 ms by intention; this often is enough.
        "auth_cache_ttl_seconds": "60",
        "auth_cache_max_size": "1000",
    }
    # MLflow reads it with interpolation.
    parser["mlflow"] = {name: value.replace("%", "%%") for name, value in settings.items()}
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()
