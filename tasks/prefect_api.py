"""Which Prefect server a flow talks to: the user's, or an embedded one that lives as long as the flow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

from infra.prefect_server import PrefectServer
from infra.settings import Settings

P = ParamSpec("P")
R = TypeVar("R")


class EmbeddedFlow(Flow[P, R]):
    """A flow that, called where no Prefect server is configured, brings its own. Workers never come through here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with prefect_api():
            return super().__call__(*args, **kwargs)


@contextmanager
def prefect_api() -> Iterator[None]:
    """Have a server for the calls inside: the configured one, else a child of ours with its page open meanwhile."""
    if PREFECT_API_URL.value():
        yield
        return
    server = PrefectServer(Settings().prefect_home)
    server.start()
    try:
        server.wait_until_healthy()
        with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_UI_URL: server.ui_url}):
            try:
                yield
            finally:
                APILogHandler().flush()  # what the server has not got by now it never will
    finally:
        server.close()


def page_url() -> str:
    """Where the Prefect page is."""
    return str(PREFECT_UI_URL.value() or str(PREFECT_API_URL.value()).removesuffix("/api"))
