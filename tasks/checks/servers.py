"""Whether somebody listens at all where a server is said to be: in no time, without its client."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from infra.mlflow.client import without_password
from infra.prefect_server import PrefectServerError

PORTS = {"http": 80, "https": 443}
PATIENCE_S = 2.0


def require_prefect(url: str | None) -> None:
    """Raise PrefectServerError where the machine of this address refuses the connection.

    Whatever else may be wrong, Prefect's own client finds out, and waits for where waiting can help.
    """
    parts = urlsplit(url or "")
    if parts.hostname is None:
        return
    try:
        socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), PATIENCE_S).close()
    except ConnectionRefusedError as error:
        raise no_prefect(str(url), error) from None
    except OSError:
        return


def no_prefect(url: str, error: Exception) -> PrefectServerError:
    """The message about a server that does not answer."""
    return PrefectServerError(
        f"no Prefect server answers at {without_password(url)} ({error}): start it, or unset PREFECT_API_URL to "
        "have one embedded"
    )
