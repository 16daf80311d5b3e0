"""Messages about a store that does not answer while a run waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from infra.storage.outage import at_once, stop_waiting, under_way
from infra.storage.telling import messages_to
from tasks.prefect.client import deployment_id

__all__ = ["at_once", "report_outages", "stop_waiting"]


@contextmanager
def report_outages(say: Callable[[str], None]) -> Iterator[None]:
    """While open, it is said to whoever looks on, and written to the log on the run's page.

    A flow run that Prefect has started again waits for the store from its start as it does later.
    """
    log = get_run_logger()

    def tell(text: str) -> None:
        say(f"! {text}")
        log.warning(text)

    again = deployment_id() is not None and flow_run.run_count > 1
    with messages_to(tell), under_way() if again else nullcontext():
        yield
