"""Tags by which Prefect's pages find the flow runs of a training run, of a spec, and of ppoflow at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run as this_flow_run

from tasks.prefect.client import short_timeout_client

OURS = "ppoflow"
NAMING = ("run", "model", "candidate")
"""Parameters of flows that say what they work on."""


def tag_run(flow: Any, flow_run: FlowRun, state: Any) -> None:
    """As a flow run begins (a hook of Prefect's): ours, and what its parameters name."""
    _tag(flow_run.id, {*flow_run.tags, *tags_of(flow_run.parameters, flow_run.name)})


def also_tag(*names: str) -> None:
    """Tag the flow run under way with what it has found out by now."""
    if this_flow_run.id:
        _tag(UUID(this_flow_run.id), {*this_flow_run.tags, OURS, *tags_of(this_flow_run.parameters, ""), *names})


def tags_of(parameters: Mapping[str, Any], name: str) -> set[str]:
    """Of a flow run with these parameters; one that trains is named as its training run."""
    tags = {OURS, *(str(parameters[key]) for key in NAMING if parameters.get(key))}
    spec = parameters.get("spec")
    if isinstance(spec, Mapping):
        tags |= {name, str(spec.get("name", ""))}
    return tags - {""}


def _tag(id: UUID, tags: Iterable[str]) -> None:
    """Without tags a flow run is as good: a server that does not answer costs seconds, and nothing else."""
    try:
        with short_timeout_client() as client:
            client.update_flow_run(id, tags=sorted(tags))
    except (HTTPError, PrefectException):
        return
