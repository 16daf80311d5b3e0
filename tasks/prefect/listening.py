"""Whether somebody listens at all where a server is said to be: in no time, without its client."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from infra.mlflow.client import without_password
from infra.prefect_server import PrefectServerError
from infra.settings import set_variables
from tasks.runs.state_folder import names_of

PORTS = {"http": 80, "https": 443}
TIMEOUT_S = 2.0


def require_prefect(url: str | None) -> None:
    """Raise PrefectServerError where the machine of this address refuses the connection.

    Whatever else may be wrong, Prefect's own client finds out, and waits for where waiting can help.
    """
    parts = urlsplit(url or "")
    if parts.hostname is None:
        return
    try:
        socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), TIMEOUT_S).close()
    except ConnectionRefusedError as error:
        raise no_prefect(str(url), error) from None
    except OSError:
        return


def not_the_api(url: str) -> PrefectServerError:
    """The message about a server that answers with something else."""
    shown = without_password(url).rstrip("/")
    meant = "" if shown.endswith("/api") else f": did you mean {shown}/api?"
    return PrefectServerError(f"what answers at {shown} is not Prefect's API{meant}")


def no_prefect(url: str, error: Exception) -> PrefectServerError:
    """The message about a server that does not answer."""
    named = [name for name in names_of("prefect_api_url") if set_variables(name)]
    remedy = f"unset {' and '.join(named)}" if named else "prefect config unset PREFECT_API_URL, in Prefect's profile,"
    return PrefectServerError(
        f"no Prefect server answers at {without_password(url)} ({without_password(str(error))}): start it, or {remedy} "
        "to have one embedded"
    )
