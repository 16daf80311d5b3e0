"""Three machines that share only S3, one lost in the middle of a rollout and one of an update: not a byte differs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.backend import open_records
from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import (
    DEADLINE_S,
    ROOT,
    SMOKE,
    command,
    digests,
    environment,
    one_server,
    ppoflow,
    processes_of,
    records,
    wait_for,
)
from tests.infra.engines.ray_nodes import RayNode, RayNodes
from tests.processes import command_line

pytestmark = pytest.mark.thorough
SETTLED_S = 0.1
ASKED_EVERY_S = 0.5


@pytest.fixture
def nodes(bucket: str) -> Iterator[RayNodes]:
    """A rollout engine's place on the first two, the training engine's on the third; each has a home of its own."""
    made = RayNodes(extra={"PPOFLOW_STORE": f"s3://{bucket}/team"})
    try:
        for resources in ('{"rollout": 1}', '{"rollout": 1}', '{"training": 1}'):
            made.add(resources)
        yield made
    finally:
        made.close()


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[None]:
    """A server for the flow, and for the same command again."""
    with one_server(tmp_path / "flow"):
        yield


def options(nodes: RayNodes) -> list[str]:
    """Of the run."""
    where = ["backend=ray", f"address={nodes.address}", "rollout_engines=2"]
    needs = ["rollout_resources.rollout=1", "training_resources.training=1"]
    return [part for text in (*where, *needs) for part in ("--set", f"engines.{text}")]


def test_a_run_on_ray_survives_two_lost_machines_with_the_bytes_of_the_embedded_run(
    smoke: FinishedRun, nodes: RayNodes, prefect: None, tmp_path: Path
) -> None:
    variables = environment(tmp_path / "flow", **nodes.variables)
    with (tmp_path / "flow.log").open("w") as log:
        run = subprocess.Popen(
            command("train", str(SMOKE), "--run", "ray", *options(nodes)),
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        recorded = open_records(variables["PPOFLOW_STORE"], "ray")
        sampling, training = nodes.nodes[1:]

        def committed(number: int) -> Callable[[], bool]:
            return lambda: (recorded.last() or 0) >= number

        wait_for(committed(1), "iteration 1", run=run, every_s=ASKED_EVERY_S)
        nodes.add('{"rollout": 1, "training": 1}')
        strike(run, sampling, lambda: True)
        wait_for(committed(2), "iteration 2", run=run, every_s=ASKED_EVERY_S)
        made = training.home / "cache" / "artifacts"
        strike(run, training, lambda: len(list(made.glob("*/experience.safetensors"))) >= 2)
        assert run.wait(DEADLINE_S) == 0, (tmp_path / "flow.log").read_text()
    finally:
        run.kill()
        run.wait()
    assert "ray::" not in (tmp_path / "flow.log").read_text()  # a stack of Ray's, as of threads that die at the end
    logs = tmp_path / "flow" / "runs" / "ray" / "logs"
    rollout = "".join((logs / f"{name}.log").read_text() for name in ("rollout", "rollout-2"))
    places = {"rollout": rollout, "training": (logs / "training.log").read_text()}
    assert [len(place.splitlines()) for place in places.values()] == [3, 2], places
    theirs = records(smoke.home, smoke.name)
    assert recorded.iterations() == [record["iteration"] for record in theirs]
    for expected in theirs:
        found = recorded.read(expected["iteration"])
        assert digests(found) == digests(expected)
    again = ppoflow(tmp_path / "flow", "train", str(SMOKE), "--run", "ray", *options(nodes), **nodes.variables)
    assert (again.returncode, again.stderr) == (0, "")
    assert "all 4 iterations are done" in again.stdout
    assert places["training"] == (logs / "training.log").read_text()  # whatever is done needs no engine
    assert "ray::" not in again.stdout
    left = [command_line(process) for node in nodes.nodes for process in processes_of(node.home)]
    assert not [line for line in left if any("ppo_core.engines" in word for word in line)]


def strike(run: subprocess.Popen[str], node: RayNode, ready: Callable[[], bool]) -> None:
    """Kill a machine in the middle of a job: its output folder is there, and stays for a while."""
    since: dict[Path, float] = {}

    def at_work() -> bool:
        now = time.monotonic()
        folders = list((node.home / "cache" / "scratch").glob("*")) if ready() else []
        for folder in folders:
            since.setdefault(folder, now)
        return any(now - since[folder] > SETTLED_S for folder in folders)

    wait_for(at_work, f"work on {node.address}", run=run)
    node.kill()
