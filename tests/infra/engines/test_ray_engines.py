"""Engines on a Ray cluster of three nodes: where they land, and what is left when anything dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.engines.protocol import Engine, EngineClosed, EngineDied, EngineJobError, EngineProgress
from infra.engines.ray import RayEngine
from infra.engines.ray_cluster import RayCluster, RayUnavailable
from tests.infra.engines.ray_jobs import echo_engine, job, never_the_same, open_misnamed, open_without_processes
from tests.infra.engines.ray_nodes import RayNodes
from tests.processes import outlived
from tests.waiting import FOR_EVER_S, LONG_S, until

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).resolve().parents[3]
Open = Callable[..., RayEngine]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes for rollout engines, one for training, and two for whoever needs another."""
    made = RayNodes()
    try:
        for resources in ('{"rollout": 1}', '{"rollout": 1, "spare": 1}', '{"training": 1, "spare": 1}'):
            made.add(resources)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes) -> Iterator[RayCluster]:
    """This process, connected, once all nodes are there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.variables.items():
            patch.setenv(name, value)
        connection = RayCluster(nodes.address)
        until(lambda: len(alive(connection)) == 3, "three nodes")
        yield connection
        connection.close()


@pytest.fixture
def engine(cluster: RayCluster, tmp_path: Path) -> Iterator[Open]:
    """Engines that are closed at the end."""
    made: list[RayEngine] = []

    def opened(resources: dict[str, float], **options: Any) -> RayEngine:
        made.append(echo_engine(cluster, tmp_path, resources, **options))
        return made[-1]

    yield opened
    for one in made:
        one.close()


def run(engine: RayEngine, name: str, seen: list[EngineProgress] | None = None, **spec: Any) -> dict[str, Any]:
    """One job."""
    seen = [] if seen is None else seen
    result: dict[str, Any] = engine.call(partial(job, name=name, spec=spec), on_progress=seen.append)
    return result


def alive(cluster: RayCluster) -> set[str]:
    """The addresses of the nodes that the cluster knows."""
    return {str(node["NodeManagerAddress"]) for node in cluster.connect().nodes() if node["Alive"]}


@contextmanager
def asleep(engine: RayEngine) -> Iterator[Future[dict[str, Any]]]:
    """While a job of it sleeps for longer than anybody waits."""
    seen: list[EngineProgress] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, engine, "sleep", seen, seconds=FOR_EVER_S, timeout_s=FOR_EVER_S)
        until(lambda: running.done() or any(one.note == "asleep" for one in seen), "the job sleeps")
        try:
            yield running
        except BaseException:
            engine.close()  # nobody else would end the job
            raise


def test_each_lands_where_its_resources_are_and_tells_how_far_it_is(
    engine: Open, nodes: RayNodes, tmp_path: Path
) -> None:
    engines = [engine({"rollout": 1}), engine({"rollout": 1}), engine({"training": 1})]
    for one in engines:
        one.start()
    homes = [run(one, "echo")["home"] for one in engines]
    assert set(homes[:2]) == {str(nodes.nodes[0].home), str(nodes.nodes[1].home)}
    assert homes[2] == str(nodes.nodes[2].home)
    seen: list[EngineProgress] = []
    run(engines[2], "progress", seen, total=3, seconds=0.4)
    assert seen
    assert [(one.job, one.total) for one in seen] == [("progress", 3)] * len(seen)
    assert "engine echo is on node 127.0.0.13" in (tmp_path / "echo.log").read_text()
    assert (nodes.nodes[2].home / "echo.log").is_file()
    began = time.perf_counter()
    for _ in range(50):
        run(engines[2], "echo")
    assert time.perf_counter() - began < 50 * 0.5  # 3 ms each where nothing else runs


def test_rows_that_are_reported_come_without_a_gap(engine: Open) -> None:
    """Messages without rows may be passed over: the last ones say enough."""
    seen: list[EngineProgress] = []
    run(engine({"training": 1}), "progress", seen, total=40, seconds=0.05, reports_rows=True)
    numbers = [row["number"] for one in seen for row in one.rows]
    assert len(numbers) > 10
    assert numbers == list(range(1, len(numbers) + 1))


def test_errors_arrive_as_what_they_are_and_the_actor_stays(engine: Open) -> None:
    one = engine({"training": 1})
    actor = run(one, "echo")["actor"]
    with pytest.raises(EngineJobError, match=r"'echo on 127.0.0.13', job 'refuse': InputError: no such") as refused:
        run(one, "refuse", retryable=False)
    assert (refused.value.error_type, refused.value.retryable) == ("InputError", False)
    with pytest.raises(EngineDied, match=r"(?s)'echo on 127.0.0.13'.* exit code 7.*the last words"):
        run(one, "crash", code=7)
    assert run(one, "echo")["actor"] == actor


def test_a_killed_actor_is_noticed_nothing_of_it_stays_and_the_next_try_works(engine: Open) -> None:
    one = engine({"training": 1})
    made = run(one, "spawn")
    pids = [*made["pids"], made["actor"]]
    with asleep(one) as running:
        os.kill(made["actor"], signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"node 127.0.0.13 \(process \d+\) was lost: .* training: 1") as death:
            running.result(timeout=LONG_S)
    assert death.value.retryable
    assert outlived(pids) == []
    assert run(one, "echo")["actor"] != made["actor"]


def test_a_job_ends_with_its_engine(engine: Open) -> None:
    one = engine({"training": 1})
    made = run(one, "spawn")
    with asleep(one) as running:
        one.close()
        with pytest.raises(EngineClosed):
            running.result(timeout=LONG_S)
    assert outlived([*made["pids"], made["actor"]]) == []
    with pytest.raises(EngineClosed, match=r"call start\(\) first"):
        run(one, "echo")


def test_without_a_node_the_wait_ends_and_says_what_there_is(engine: Open) -> None:
    seen: list[EngineProgress] = []
    with pytest.raises(RayUnavailable, match=r"no node .* had nothing: 1 free. It has 3 nodes: .*rollout: 1") as told:
        run(engine({"nothing": 1}, placement_timeout_s=6), "echo", seen)
    assert not told.value.retryable
    assert [one.job for one in seen] == ["waiting for a node with nothing: 1"]


def test_other_code_on_a_node_is_refused(engine: Open) -> None:
    with pytest.raises(RayUnavailable, match=r"node 127.0.0.13 has other code .* install the same version") as told:
        run(engine({"training": 1}, facts=never_the_same), "echo")
    assert not told.value.retryable


@pytest.mark.parametrize(("opened", "passes"), [(open_without_processes, True), (open_misnamed, False)])
def test_what_the_system_refuses_while_an_engine_is_made_is_tried_again(
    engine: Open, opened: Callable[[str], Engine], passes: bool
) -> None:
    with pytest.raises(RayUnavailable, match=r"cannot work on node 127.0.0.13: (BlockingIO|Lookup)Error: ") as told:
        run(engine({"training": 1}, opened=opened), "echo")
    assert told.value.retryable == passes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_flow(cluster: RayCluster, nodes: RayNodes, tmp_path: Path, number: int) -> None:
    program = [sys.executable, "-m", "tests.infra.engines.ray_jobs", nodes.address, str(tmp_path)]
    flow = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE)
    assert flow.stdout is not None
    with flow.stdout as output:
        pids = json.loads(output.readline())
        assert outlived(pids, within_s=0) == pids
        flow.send_signal(number)
        if number == signal.SIGTERM:  # Ray's own handler would end the process without a word
            assert output.readline() == b"interrupted\n"
    assert flow.wait(LONG_S) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert outlived(pids) == []


@pytest.mark.parametrize("used", ["2", "1", "0"])
def test_the_end_of_a_program_is_quiet(nodes: RayNodes, cluster: RayCluster, tmp_path: Path, used: str) -> None:
    """One after the other, as a run and the run that goes on with it; nothing connects again after the end."""
    program = [sys.executable, "-m", "tests.infra.engines.ray_jobs", nodes.address, str(tmp_path), used]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [False, []]


def test_without_the_token_nobody_gets_in(nodes: RayNodes, cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0" * 64)
    other = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_NUM_REDIS_GET_RETRIES": "1"}
    environment = {**os.environ, **other}
    program = [sys.executable, "-m", "tests.infra.engines.ray_jobs", nodes.address, str(tmp_path)]
    refused = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert "RayUnavailable: no connection to the Ray cluster" in refused.stderr
    assert "token" in refused.stderr


def test_a_lost_node_is_told_and_the_next_try_goes_to_another(
    engine: Open, nodes: RayNodes, cluster: RayCluster
) -> None:
    """The last test: of the three nodes only the first is left."""
    one = engine({"spare": 1})
    homes = [str(node.home) for node in nodes.nodes]
    for how in ("raylet", "node"):
        made = run(one, "spawn")
        node = nodes.nodes[homes.index(made["home"])]
        with asleep(one) as running:
            if how == "raylet":
                os.kill(node.child("raylet"), signal.SIGKILL)
            else:
                node.kill()
            with pytest.raises(EngineDied, match=rf"node {node.address} \(process \d+\) was lost") as death:
                running.result(timeout=LONG_S)
        assert death.value.retryable
        assert outlived([*made["pids"], made["actor"]]) == []
        # The engine's process is missed first: until its node is, a next try may go there in vain.
        until(lambda node=node: node.address not in alive(cluster), "the cluster has noticed")
    replacement = nodes.add('{"spare": 1}')
    assert run(one, "echo")["home"] == str(replacement.home)
