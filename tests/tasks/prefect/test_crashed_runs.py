"""Prefect's pages do not lie: the flow run of a process that died is shown as Crashed, with its tasks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import State
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateDetails
from prefect.client.schemas.responses import SetStateStatus
from prefect.runtime import flow_run as runtime_flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Completed, Failed, Paused, Pending, Running, Suspended

from infra.runs.lease import LeaseOwner
from tasks.prefect.client import deployment_id, tries
from tasks.prefect.crashed_runs import FLOW_RUN, mark_crashed, page_is_open
from tests.infra.runs.leases import somebody

pytestmark = pytest.mark.usefixtures("prefect_server")
CLIENTS_OWN_S = 60.0
"""About so long Prefect's client asks a server that fails, at each call."""


@flow
def training() -> None:
    """Never called."""


@task
def update_policy() -> None:
    """Never called."""


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    """Of the test server."""
    with get_client(sync_client=True) as client:
        yield client


def flow_run(client: SyncPrefectClient, state: State, *tasks: State) -> UUID:
    """A flow run in a state, with tasks in theirs."""
    id = client.create_flow_run(training, name="demo", state=Pending()).id
    for number, task_state in enumerate(tasks):
        made = client.create_task_run(update_policy, id, dynamic_key=str(number), state=Pending())
        client.set_task_run_state(made.id, task_state, force=True)
    client.set_flow_run_state(id, state, force=True)
    return id


def states(client: SyncPrefectClient, id: UUID) -> tuple[str | None, list[str | None]]:
    """Of a flow run and of its tasks."""
    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[id])))
    return client.read_flow_run(id).state_name, sorted(found.state_name or "" for found in tasks)


def holder(note: dict[str, str]) -> LeaseOwner:
    """A process that had the run."""
    return LeaseOwner(identity=somebody(), since_ms=1, note=note)


def test_a_flow_run_whose_process_died_and_its_tasks_are_shown_as_crashed(client: SyncPrefectClient) -> None:
    id = flow_run(client, Running(), Completed(), Running(), Completed(name="Cached"), Pending())
    assert states(client, id) == ("Running", ["Cached", "Completed", "Pending", "Running"])
    assert mark_crashed([holder({FLOW_RUN: str(id)})]) == ["demo"]
    assert states(client, id) == ("Crashed", ["Cached", "Completed", "Crashed", "Crashed"])
    state = client.read_flow_run(id).state
    assert state is not None
    assert state.message == "The process died; the run goes on in another flow run."
    assert mark_crashed([holder({FLOW_RUN: str(id)})]) == []  # told once


def test_one_that_has_ended_stays_and_one_that_nobody_knows_does_no_harm(client: SyncPrefectClient) -> None:
    ended, died = flow_run(client, Completed(), Completed()), flow_run(client, Running())
    notes = [{FLOW_RUN: str(ended)}, {FLOW_RUN: str(uuid4())}, {}, {FLOW_RUN: str(died)}]
    assert mark_crashed(holder(note) for note in notes) == ["demo"]
    assert states(client, ended) == ("Completed", ["Completed"])
    assert states(client, died) == ("Crashed", [])


def test_a_flow_run_that_was_started_again_goes_on_and_only_its_dead_tasks_end(client: SyncPrefectClient) -> None:
    @flow(persist_result=False)
    def goes_on(dynamic_key: str) -> tuple[str, list[str | None]]:
        own = UUID(str(runtime_flow_run.id))
        dead = client.create_task_run(update_policy, own, dynamic_key=dynamic_key, state=Pending())
        client.set_task_run_state(dead.id, Running(), force=True)
        assert mark_crashed([holder({FLOW_RUN: str(own)})]) == []
        return str(own), [states(client, own)[0], client.read_task_run(dead.id).state_name]

    id, found = goes_on("dead")
    assert found == ["Running", "Crashed"]
    assert states(client, UUID(id)) == ("Completed", ["Crashed"])


def test_a_flow_run_below_one_that_died_is_crashed_too(client: SyncPrefectClient) -> None:
    """As an evaluation that `ppoflow rlhf` waited for: nobody listens to its page any more."""
    above, below = flow_run(client, Running()), flow_run(client, Paused(), Running())
    tracking = client.create_task_run(update_policy, above, dynamic_key="below", state=Pending())
    state = Running(state_details=StateDetails(child_flow_run_id=below))
    client.set_task_run_state(tracking.id, state, force=True)
    assert mark_crashed([holder({FLOW_RUN: str(above)})]) == ["demo"]
    assert states(client, above) == ("Crashed", ["Crashed"])
    assert states(client, below) == ("Crashed", ["Crashed"])


def test_tries_are_counted_and_going_on_after_a_suspension_is_none(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = client.create_deployment(client.create_flow(training), "asks")
    id = client.create_flow_run_from_deployment(deployment).id
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(id))  # as a worker's process has it
    client.set_flow_run_state(id, Pending())
    client.set_flow_run_state(id, Running())
    assert tries() == 1
    client.set_flow_run_state(id, Suspended(timeout_seconds=60))
    assert client.resume_flow_run(id).status == SetStateStatus.ACCEPT
    for state in (Pending(), Running()):
        client.set_flow_run_state(id, state)
    assert tries() == 1
    client.set_flow_run_state(id, Failed())
    for state in (AwaitingRetry(), Pending(), Running()):
        client.set_flow_run_state(id, state)
    assert tries() == 2


def test_whether_a_page_can_be_told_is_known_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    @flow(persist_result=False)
    def ends() -> tuple[bool, bool, float]:
        there = page_is_open()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
            began = time.monotonic()
            monkeypatch.setattr("tasks.prefect.client.ANSWER_S", 1.0)
            with temporary_settings({PREFECT_API_URL: url}):
                return there, page_is_open(), time.monotonic() - began

    there, silent, seconds = ends()
    assert (there, silent) == (True, False)
    assert seconds < CLIENTS_OWN_S
    assert page_is_open()  # outside of a flow there is no page


def test_prefect_is_asked_once_for_the_deployment_of_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    async def read(id: str) -> SimpleNamespace:
        asked.append(id)
        return SimpleNamespace(deployment_id="deployed")

    monkeypatch.setattr("prefect.runtime.deployment._get_flow_run", read)

    @flow(persist_result=False)
    def twice() -> list[str | None]:
        return [deployment_id(), deployment_id()]

    assert deployment_id() is None
    assert (twice(), twice()) == (["deployed"] * 2, ["deployed"] * 2)
    assert len(asked) == len(set(asked)) == 2
