"""MLflow's login from a private file, for every client of MLflow's: what MLFLOW_TRACKING_AUTH=ppoflow names.

MLflow itself reads a login from the environment, or from one fixed file of the user's, whatever the server.
"""

from __future__ import annotations

import configparser
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.tracking.request_auth.abstract_request_auth_provider import RequestAuthProvider
from requests.auth import HTTPBasicAuth

from infra.settings import Settings

SECTION, USERNAME, PASSWORD = "mlflow", "mlflow_tracking_username", "mlflow_tracking_password"
"""As in MLflow's own file ~/.mlflow/credentials."""


class FileLogin(RequestAuthProvider):
    """The login in the file that PPOFLOW_MLFLOW_CREDENTIALS names."""

    def get_name(self) -> str:
        """What MLFLOW_TRACKING_AUTH says."""
        return "ppoflow"

    def get_auth(self) -> HTTPBasicAuth:
        """For one request."""
        path = Settings().mlflow_credentials
        if path is None:
            raise MlflowException("MLFLOW_TRACKING_AUTH=ppoflow needs a file: name it in PPOFLOW_MLFLOW_CREDENTIALS")
        return HTTPBasicAuth(*read_login(path))


def read_login(path: Path) -> tuple[str, str]:
    """User and password. MlflowException where the file cannot be read, or others can read it."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        if path.stat().st_mode & 0o077:
            raise MlflowException(f"PPOFLOW_MLFLOW_CREDENTIALS: {path} can be read by others: chmod 600 {path}")
        parser.read_string(path.read_text(encoding="utf-8"))
        return parser[SECTION][USERNAME], parser[SECTION][PASSWORD]
    except OSError as error:
        raise MlflowException(f"PPOFLOW_MLFLOW_CREDENTIALS: {path}: {error.strerror}") from None
    except (configparser.Error, KeyError, UnicodeDecodeError):
        # Not the parser's own message: it quotes what it read.
        raise MlflowException(
            f"PPOFLOW_MLFLOW_CREDENTIALS: {path} holds no section [{SECTION}] with {USERNAME} and {PASSWORD}"
        ) from None
