"""Echo engines on Ray's nodes: what is pickled by name, and a program that uses one and is killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from infra.artifacts import ArtifactStore, open_store
from infra.engines.process import EngineProcess
from infra.engines.protocol import Engine, EngineJob, EngineProgress
from infra.engines.ray import RayEngine
from infra.engines.ray_cluster import RayCluster
from infra.engines.ray_host import Blueprint
from infra.settings import Settings

ECHO = Path(__file__).with_name("echo_engine.py")


def open_echo(node: str) -> EngineProcess:
    """An echo engine that logs in the node's own home."""
    return EngineProcess(f"echo on {node}", "", log=Settings().home / "echo.log", command=[sys.executable, str(ECHO)])


def open_without_processes(node: str) -> EngineProcess:
    """As on a node that has no process left to give; it may have in a moment."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def open_misnamed(node: str) -> EngineProcess:
    """As with code that is wrong there, and stays it."""
    raise LookupError("no such engine")


def same_everywhere() -> Mapping[str, str]:
    """Facts of the code."""
    return {"code": "1"}


def never_the_same() -> Mapping[str, str]:
    """Facts of other code."""
    return {"code": str(os.getpid())}


def job(
    store: ArtifactStore, engine: Engine, watch: Callable[[EngineProgress], None], *, name: str, spec: dict[str, Any]
) -> dict[str, Any]:
    """One job of an echo engine; the result has the home of the node besides."""
    asked = EngineJob(name, {}, None, spec, spec.get("reports_rows", False))
    reply = engine.run(asked, timeout_s=spec.get("timeout_s", 300), on_progress=watch)
    return {**reply.result, "home": str(Settings().home), "store": store.root, "actor": os.getpid()}


def echo_engine(
    cluster: RayCluster,
    folder: Path,
    resources: Mapping[str, float],
    *,
    opened: Callable[[str], Engine] = open_echo,
    facts: Callable[[], Mapping[str, str]] = same_everywhere,
    placement_timeout_s: float = 300.0,
) -> RayEngine:
    """An engine on some node."""
    blueprint = Blueprint(opened, partial(open_store, str(folder / "store")), facts)
    return RayEngine(
        "echo",
        cluster,
        blueprint,
        resources=resources,
        placement_timeout_s=placement_timeout_s,
        log=folder / "echo.log",
    )


def end_in_order(address: str, folder: Path, used: int) -> None:
    """Start two engines, use so many of them, and end; one more is started too late."""
    cluster = RayCluster(address)
    ray = cluster.connect()
    engines = [echo_engine(cluster, folder, {"rollout": 1.0}) for _ in range(2)]
    for engine in engines:
        engine.start()
    for engine in engines[:used]:
        engine.call(partial(job, name="echo", spec={}), on_progress=lambda progress: None)
    for engine in engines:
        engine.close()
    cluster.close()
    late = echo_engine(cluster, folder, {"rollout": 1.0})
    late.start()
    late.close()
    placing = [thread.name for thread in threading.enumerate() if thread.name.startswith("place-")]
    print(json.dumps([ray.is_initialized(), placing]), flush=True)


def main() -> None:
    """Start a tree of processes on a node, tell their ids, and work until the end; SIGTERM ends the work first."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if len(sys.argv) > 3:
        end_in_order(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
        return
    signal.signal(signal.SIGTERM, end)
    cluster = RayCluster(sys.argv[1])
    engine = echo_engine(cluster, Path(sys.argv[2]), {"rollout": 1.0})

    def ignore(progress: EngineProgress) -> None:
        """Nothing to show."""

    pids = engine.call(partial(job, name="spawn", spec={}), on_progress=ignore)
    try:
        print(json.dumps([*pids["pids"], pids["actor"]]), flush=True)
        engine.call(partial(job, name="sleep", spec={"seconds": 3600, "timeout_s": 3600}), on_progress=ignore)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    engine.close()
    cluster.close()


if __name__ == "__main__":
    main()
