"""Deployments with a real server and worker: a crashed run goes on by itself, a cancelled one ends its engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import SyncClientContext
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from infra.prefect_server import PrefectServer
from tasks.prefect.automations import POOL, RESUMABLE, SETTLE_S, prepare_server
from tests.e2e.launch import DEADLINE_S, SMOKE, processes_of
from tests.processes import command_line
from tests.tasks.run_contexts import smoke_spec
from tests.waiting import LONG_S

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Workplace:
    """A server that `ppoflow deploy` has prepared, a worker, and where its flows keep their state."""

    client: SyncPrefectClient
    home: Path

    def start(self, entrypoint: str, parameters: dict[str, Any], *tags: str) -> UUID:
        """A flow run of a deployment of its own."""
        path, _, name = entrypoint.partition(":")
        flow = load_flow_from_entrypoint(f"{ROOT / path}:{name}")
        here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        deployed = self.client.create_deployment(
            self.client.create_flow(flow),
            name,
            entrypoint=entrypoint,
            pull_steps=[here],
            work_pool_name=POOL,
            tags=list(tags),
            parameter_openapi_schema=flow.parameters.model_dump_for_openapi(),
            enforce_parameter_schema=True,
        )
        return self.client.create_flow_run_from_deployment(deployed, parameters=parameters).id

    def run(self, id: UUID) -> FlowRun:
        return self.client.read_flow_run(id)

    def states(self, id: UUID) -> list[str]:
        return [state.name or "" for state in self.client.read_flow_run_states(id)]

    def wait(self, id: UUID, happened: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not happened():
            assert time.monotonic() < deadline, f"{what}: not within {deadline_s} s, but {self.states(id)}"
            time.sleep(0.1)

    def engines(self) -> list[psutil.Process]:
        found = [(process, command_line(process)) for process in processes_of(self.home)]
        return [process for process, line in found if any("ppo_core.engines" in part for part in line)]


@contextmanager
def worker(api: str, home: Path) -> Iterator[None]:
    """One of the pool, in a session of its own."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home / "worker"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PPOFLOW_HOME": str(home),
    }
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--install-policy", "never"]
    with (home / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for left in processes_of(home):
            with suppress(psutil.NoSuchProcess):
                left.kill()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    home = tmp_path_factory.mktemp("work")
    server = PrefectServer(home / "prefect", port=0)
    server.start()
    with pytest.MonkeyPatch.context() as alone, closing(server):
        server.wait_until_healthy(LONG_S)
        # Where another test of this process has a server of its own, Prefect would take that one's client.
        alone.setattr(SyncClientContext, "get", lambda: None)
        with temporary_settings({PREFECT_API_URL: server.api_url}), get_client(sync_client=True) as client:
            first = prepare_server()
            assert prepare_server() == first
            assert [found.name for found in client.read_automations()] == [
                "ppoflow: a crashed run goes on",
                "ppoflow: a silent run has crashed",
            ]
            with worker(server.api_url, home):
                yield Workplace(client, home)


def test_a_run_whose_process_dies_goes_on_by_itself_as_the_same_flow_run(workplace: Workplace) -> None:
    parameters = {"spec": {"name": "toy"}, "home": str(workplace.home / "toy")}
    id = workplace.start("tests/flows/deployed_program.py:toy_training", parameters, RESUMABLE)
    workplace.wait(id, lambda: workplace.run(id).state_name == "Completed", "the second process ends the run")
    states, run = workplace.states(id), workplace.run(id)
    assert states.index("Crashed") < states.index("AwaitingRetry") < states.index("Completed")
    assert run.run_count == 2
    [folder] = [
        path for path in (workplace.home / "toy" / "store" / "runs").iterdir() if (path / "spec.json").is_file()
    ]
    assert folder.name == run.name
    assert sorted(path.name for path in (folder / "iterations").iterdir()) == [f"{n:06d}.json" for n in range(4)]


def test_a_cancelled_run_is_not_started_again_though_its_process_crashed_meanwhile(workplace: Workplace) -> None:
    """As on a busy machine: a process that does not answer its runner within a second is ended as if by accident."""
    home = workplace.home / "deaf"
    id = workplace.start("tests/flows/deployed_program.py:deaf", {"spec": {}, "home": str(home)}, RESUMABLE)
    workplace.wait(id, home.exists, "it runs")
    workplace.client.set_flow_run_state(id, Cancelling())
    workplace.wait(id, lambda: workplace.run(id).state_name == "Cancelled", "it is cancelled")
    time.sleep(2 * SETTLE_S)
    states = workplace.states(id)
    assert states.index("Crashed") < states.index("Cancelled") == len(states) - 1


def test_cancelling_a_run_ends_its_engines_and_it_stays_cancelled(workplace: Workplace) -> None:
    endless = smoke_spec("iterations=5000").model_copy(update={"folder": str(SMOKE.parent)})
    spec = endless.model_dump(mode="json")
    id = workplace.start("flows/ppo.py:ppo_training", {"spec": spec}, RESUMABLE)
    workplace.wait(id, lambda: len(workplace.engines()) >= 3, "engines run")
    workplace.client.set_flow_run_state(id, Cancelling())
    workplace.wait(id, lambda: not workplace.engines(), "the engines end")
    workplace.wait(id, lambda: workplace.run(id).state_name == "Cancelled", "it is cancelled")
    run = workplace.run(id)
    assert run.run_count == 1
    assert set(run.tags) == {RESUMABLE, "ppoflow", "arithmetic-smoke", run.name}
