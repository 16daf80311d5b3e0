"""What Prefect, and the clients of servers on this machine, read from the environment."""

from __future__ import annotations

from infra.settings import export, reach_directly


def prepare() -> None:
    """Prefect's log lines go to its page, not to the console, and a server that fails is asked again for a minute.

    Call before prefect is imported. Servers on this machine, MLflow's too, are asked past a proxy of the environment.
    """
    export(
        {
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
            "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # its own services, each time they find no server
            "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504",  # while its database restarts; 502 and 503 it repeats anyway
            "DO_NOT_TRACK": "1",
        }
    )
    reach_directly()
