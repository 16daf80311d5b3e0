"""What Prefect's pages say of the processes that held a run before: a flow run that died says so."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import State
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Crashed

from infra.runs.lease import LeaseOwner
from tasks.prefect.client import short_timeout_client

FLOW_RUN = "prefect_flow_run"


def holder_note() -> dict[str, str]:
    """What the next holder of the run should know of this one."""
    return {FLOW_RUN: str(flow_run.id)} if flow_run.id else {}


def page_is_open() -> bool:
    """Whether Prefect's server can be told now how this flow run ends; where it cannot, the next holder tells it."""
    if not flow_run.id:
        return True
    id = UUID(flow_run.id)
    try:
        with short_timeout_client() as client:
            client.read_flow_run(id)
    except (HTTPError, PrefectException):
        return False
    return True


def mark_crashed(predecessors: Iterable[LeaseOwner]) -> list[str]:
    """Set the flow runs of dead holders, which say Running for ever, to Crashed. Returns their names.

    A flow run that was started again is its own predecessor: it goes on, and only the tasks of its dead process end.
    """
    marked: list[str] = []
    ids = [UUID(holder.note[FLOW_RUN]) for holder in predecessors if FLOW_RUN in holder.note]
    try:
        with get_client(sync_client=True) as client:
            marked = [name for id in ids if (name := _mark(client, id)) is not None]
    except (HTTPError, PrefectException) as error:
        get_run_logger().warning("the flow runs of dead predecessors could not be set to Crashed: %s", error)
    return marked


def _mark(client: SyncPrefectClient, id: UUID) -> str | None:
    """Set one flow run, its tasks and the flow runs below it to Crashed; None where the server does not know it, it has
    ended, or is ours."""
    try:
        found = client.read_flow_run(id)
    except ObjectNotFound:
        return None
    if found.state is not None and found.state.is_final():
        return None
    crashed: State[None] = Crashed(message="The process died; the run goes on in another flow run.")
    types = TaskRunFilterStateType(any_=[type for type in StateType if type not in TERMINAL_STATES])
    under_way = TaskRunFilter(state=TaskRunFilterState(type=types, name=None))
    of_it = FlowRunFilter(id=FlowRunFilterId(any_=[id]))
    # The server tells of 200 tasks at a time, and a long run has more; of those under way there are few.
    for task in client.read_task_runs(flow_run_filter=of_it, task_run_filter=under_way):
        child = task.state.state_details.child_flow_run_id if task.state is not None else None
        if child is not None:
            _mark(client, child)
        client.set_task_run_state(task.id, crashed, force=True)
    if str(id) == flow_run.id:
        return None
    client.set_flow_run_state(id, crashed, force=True)
    return found.name
