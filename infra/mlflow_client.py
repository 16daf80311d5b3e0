"""The way to MLflow: its client, with an outage kept short."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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


def open_client(uri: str) -> MlflowClient:
    """A client with short timeouts. The first call in a process imports MLflow (1 to 4 s)."""
    export(ENVIRONMENT)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def without_password(uri: str) -> str:
    """The address of a server or database as it may be printed."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", uri)
