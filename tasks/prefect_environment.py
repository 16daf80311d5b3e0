"""What Prefect reads from the environment when it is imported."""

from __future__ import annotations

from infra.settings import export


def prepare() -> None:
    """Prefect's log lines go to its page, not to the console. Call before prefect is imported."""
    export(
        {
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
            "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # its own services, each time they find no server
            "DO_NOT_TRACK": "1",
        }
    )
