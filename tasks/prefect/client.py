"""What flows ask of Prefect's server, at little cost: each client by itself reads all settings and certificates."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from uuid import UUID

import certifi
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SettingsContext, get_settings_context
from prefect.runtime import deployment, flow_run
from prefect.states import Running

ANSWER_S = 6.0


@contextmanager
def short_timeout_client(answer_s: float | None = None) -> Iterator[SyncPrefectClient]:
    """A client that asks once, and waits so many seconds (`ANSWER_S`) for it; the flow's own tries for minutes."""
    context = get_settings_context()
    client = context.settings.client.model_copy(update={"max_retries": 0})
    once = context.settings.model_copy(update={"client": client})  # Prefect's own way reads all settings anew: 25 ms
    how: dict[str, Any] = {"timeout": answer_s or ANSWER_S}
    if not once.api.tls_insecure_skip_verify:
        how["verify"] = _trusted(once.api.ssl_cert_file or certifi.where())
    with SettingsContext(profile=context.profile, settings=once), get_client(how, sync_client=True) as asked:
        yield asked


def deployment_id() -> str | None:
    """The deployment that the flow run under way, or the one that called it, was started by."""
    return _deployment_of(str(flow_run.id)) if flow_run.id else None


@cache
def _deployment_of(flow_run_id: str) -> str | None:
    """Prefect asks its server each time."""
    return deployment.id


@cache
def _trusted(certificates: str) -> ssl.SSLContext:
    """As Prefect's client makes it, each time anew: 30 ms."""
    return ssl.create_default_context(cafile=certificates)


def tries() -> int:
    """How often the flow run under way was started; going on after a suspension or a pause does not count."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(str(flow_run.id))).run_count


def go_on_after_pause() -> None:
    """Have Prefect know that this flow run, for whose pause nobody came, goes on: it would only let it fail."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(str(flow_run.id)), Running(), force=True)
