"""The way to MLflow: its client, with an outage kept short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from infra.addresses import sqlite_file
from infra.empty_databases import begin
from infra.settings import export

if TYPE_CHECKING:
    from mlflow import MlflowClient

# With MLflow's defaults one hanging call takes 20 minutes, and a locked database prints its traceback into our table.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
}

UPLOAD_S, BYTES_A_SECOND = 60, 5_000_000
"""What a server is given to store a file, besides the time at a rate that is slow for any."""
AWAY = "does not answer"
NO_ANSWER = ("Max retries exceeded", "ConnectionError", "ConnectTimeout", "ReadTimeout", "no answer within")
MAX_LINE = 240


def import_mlflow() -> type[MlflowClient]:
    """MLflow's client, with short timeouts; 1 to 4 s in a process that has not imported it yet."""
    export(ENVIRONMENT)
    from mlflow import MlflowClient

    return MlflowClient


@contextmanager
def uploading(folder: Path) -> Iterator[None]:
    """Have MLflow's client wait for as long as a server may take to store the largest file: it answers only then."""
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as TIMEOUT

    before, largest = TIMEOUT.get(), max(path.stat().st_size for path in folder.rglob("*"))
    TIMEOUT.set(max(before, UPLOAD_S + largest // BYTES_A_SECOND))
    try:
        yield
    finally:
        TIMEOUT.set(before)


def open_client(uri: str) -> MlflowClient:
    """A client of this server or database."""
    if (file := sqlite_file(uri)) is not None:
        begin("mlflow", file)
    return import_mlflow()(tracking_uri=uri, registry_uri=uri)


def without_password(uri: str) -> str:
    """The address of a server or database as it may be printed: without a password, or a token that stands alone."""
    without_token = re.sub(r"(https?://)[^:/@]*@", r"\1***@", uri)
    without_login = re.sub(r"(://[^:/@\s]*):[^/\s]*@", r"\1:***@", without_token)
    if not is_server(uri):  # a database's password may hold a slash
        without_login = re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", without_login)
    return re.sub(r"(?i)([?&][^=&\s]*(?:passw|secret|token|key)[^=&\s]*=)[^&\s]*", r"\1***", without_login)


def is_server(uri: str) -> bool:
    """Whether this is the address of a server; else it is that of a database."""
    return uri.startswith(("http://", "https://"))


def in_short(error: str) -> str:
    """What went wrong, in a line that may be printed; of a server that is away MLflow tells at length."""
    if any(sign in error for sign in NO_ANSWER):
        return AWAY
    line = error.strip().partition("\n")[0]
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} …"
