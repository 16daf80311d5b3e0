"""What a Prefect server needs besides deployments: a work pool of one slot, and automations. Doing it again is safe.

A pool stands for one machine's GPUs (or one cluster's): of all its flow runs, one at a time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

POOL, POOL_TYPE = "gpu", "process"
ALONE = "One flow run at a time: it has the GPUs."
RESUMABLE = "resumable"
"""The tag of deployments whose flow runs go on where they stopped when they are started again."""
OURS = "ppoflow"
"""The tag of all deployments: what is not resumable is started again by nobody, but must not keep the pool's slot."""

HEARTBEAT_S = 30
SILENT_S = 3 * HEARTBEAT_S
SETTLE_S = 10
"""A dead process is reported twice, by its runner and by the worker, up to seconds apart: a second "Crashed" after the
flow run was started again would end it for good."""
SETTLED = ("Scheduled", "AwaitingRetry", "Pending", "Running", "Cancelled")
"""What ends the wait after a crash. A run that is cancelled crashes first where its process is too busy to answer its
runner within a second: Prefect marks it Cancelled once the process has ended."""
ENDED = ("Completed", "Failed", "Cancelled", "Cancelling", "Paused", "Suspended")
"""What ends the wait for a heartbeat. Not Crashed and AwaitingRetry: on SQLite, Prefect can lose an event for which an
automation reads its counter before it writes it, and with it all later ones of that flow run for 15 minutes. Prefect
itself refuses Crashed for a flow run that has ended, and one that goes on has heartbeats again."""


def prepare_server(pool: str = POOL) -> list[str]:
    """Create what is missing, and bring the automations up to date. Returns what there is now, a line each."""
    with get_client(sync_client=True) as client:
        lines = [ensure_pool(client, pool)]
        return lines + [ensure_automation(client, wanted) for wanted in (go_on_after_crash(), notice_silence())]


def ensure_pool(client: SyncPrefectClient, name: str) -> str:
    """A pool that is there stays as its owner has set it; one that a worker has made by itself gets what ours have."""
    try:
        found = client.read_work_pool(name)
    except ObjectNotFound:
        found = client.create_work_pool(
            WorkPoolCreate(name=name, type=POOL_TYPE, concurrency_limit=1, description=ALONE)
        )
    if found.concurrency_limit is None and not found.description:
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=1, description=ALONE))
        found = client.read_work_pool(name)
    limit = "no limit" if found.concurrency_limit is None else f"at most {found.concurrency_limit} at a time"
    return f"work pool {name} ({found.type}, {limit})"


def ensure_automation(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    """By its name: one of each; whether it is switched on stays as it is."""
    known = client.read_automations_by_name(wanted.name)
    if known:
        client.update_automation(known[0].id, wanted.model_copy(update={"enabled": known[0].enabled}))
    else:
        client.create_automation(wanted)
    return f"automation {wanted.name!r}"


def go_on_after_crash() -> AutomationCore:
    """A crashed flow run is started again: it finds its run by name, and goes on after the last committed iteration."""
    return AutomationCore(
        name="ppoflow: a crashed run goes on",
        description="Starts the same flow run again when its process has died; it goes on where it stopped.",
        trigger=missing({"prefect.flow-run.Crashed"}, events(SETTLED), SETTLE_S, RESUMABLE),
        actions=[
            ChangeFlowRunState(
                state=StateType.SCHEDULED, name="AwaitingRetry", message="Its process had died; it goes on.", force=True
            )
        ],
    )


def notice_silence() -> AutomationCore:
    """A flow run whose machine is gone says nothing any more, and nobody says it has crashed: so this does."""
    beat = "prefect.flow-run.heartbeat"
    return AutomationCore(
        name="ppoflow: a silent run has crashed",
        description=f"Marks a flow run Crashed that gave no heartbeat for {SILENT_S} s: its machine or worker is gone.",
        trigger=missing({beat}, {beat} | events(ENDED), SILENT_S, OURS),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, message=f"No heartbeat for {SILENT_S} s: its machine or worker is gone."
            )
        ],
    )


def missing(after: set[str], expected: set[str], seconds: int, tag: str) -> EventTrigger:
    """Fires for a flow run with this tag `seconds` after one of `after`, unless one of `expected` came meanwhile."""
    return EventTrigger(
        after=after,
        expect=expected,
        match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=tagged(tag),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
    )


def events(states: tuple[str, ...]) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}


def tagged(tag: str) -> ResourceSpecification:
    """Flow runs with this tag."""
    spec: dict[str, Any] = {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
    return ResourceSpecification.model_validate(spec)
