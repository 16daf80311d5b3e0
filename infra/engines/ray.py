"""Engines on the machines of a Ray cluster: each is an actor that lands where its resources are.

    flow process                     some node
    RayEngine ──── Ray actor ──────► EngineHost ──► guardian.py ──► python -m ppo_core.engines.rollout
         └──────────────── the S3 store ──────┘

Ray places the actor and reports its death, or its node's. We make a new one then, so that the wait for a node has an
end; the flow's retry sends the work again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.engines.protocol import EngineClosed, EngineDied, EngineError, EngineProgress, OnProgress
from infra.engines.ray_cluster import RayCluster, RayUnavailable
from infra.engines.ray_host import Blueprint, EngineHost, Greeting, Outcome, Work

CREATION = "creation task"
"""In what Ray says of an actor that could not be made, wherever it was placed."""
POLL_S = 0.25
SAY_EVERY_S = 5.0
HOST_SILENCE_S = 60.0
"""An actor that does not even say how far it is for so long is frozen, which Ray does not notice."""
END_S = 5.0
"""So long the end waits for a thread that places an actor, and for Ray to say that an actor is gone."""
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
# Else Ray kills the guardian together with the actor, and whatever the engine has started stays.
KEEP_GUARDIAN = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}


@dataclass
class Placed:
    """An actor; `greeting` is there once it is up."""

    actor: Any
    prepared: Any
    greeting: Greeting | None = None

    @property
    def place(self) -> str:
        """In words."""
        return f"node {self.greeting.node} (process {self.greeting.pid})" if self.greeting else "its node"


class RayEngine:
    """An engine in an actor. `resources` are what it asks Ray for; the file `log` notes where it was."""

    def __init__(
        self,
        name: str,
        cluster: RayCluster,
        blueprint: Blueprint,
        *,
        resources: Mapping[str, float],
        placement_timeout_s: float,
        log: Path,
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._blueprint = blueprint
        # Now, in one thread: Python 3.11 cannot parse code in two at once, which is how fingerprints are made.
        self._facts = dict(blueprint.facts())
        self._resources = dict(resources)
        self._placement_timeout_s = placement_timeout_s
        self._log = log
        self._lock = threading.Lock()  # guards the two below
        self._placed: Placed | None = None
        self._closed = False
        self._placing: threading.Thread | None = None

    def start(self) -> None:
        """Begin to place it, and return at once. A failure is raised by the next call."""
        self._closed = False
        self._begin()

    def call(self, work: Work, *, on_progress: OnProgress) -> Any:
        """Have the work done beside the engine. Its own errors arrive as what they were; any other is an EngineError,
        after which the actor is gone and the next call places a new one."""
        with self._cluster.used() as ray:
            return self._called(ray, work, on_progress)

    def close(self) -> None:
        """End the actor and everything below it; nothing of ours is at Ray any more when this returns."""
        with self._lock:
            self._closed = True
            placed, placing = self._placed, self._placing
        if placing is not None:
            placing.join(END_S)
        if placed is not None:
            with self._cluster.used() as ray:
                self._drop(ray, placed)
                # Leaving the cluster with an end under way would leave Ray's own threads at work.
                with suppress(ray.exceptions.RayError):
                    ray.wait([placed.actor.progress.remote()], timeout=END_S)

    def _called(self, ray: Any, work: Work, on_progress: OnProgress) -> Any:
        placed = self._up(ray, on_progress)
        try:
            outcome = self._watched(ray, placed, placed.actor.do.remote(work), on_progress)
        except ray.exceptions.RayError as error:
            self._drop(ray, placed)
            raise self._buried(placed, error) from error
        except BaseException:
            self._drop(ray, placed)
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _up(self, ray: Any, on_progress: OnProgress) -> Placed:
        """An actor that is up. One that is lost before is placed anew: Ray may send it to a node that has just died."""
        began = time.monotonic()
        while True:
            placed = self._place(ray)
            try:
                if placed.greeting is None:
                    placed.greeting = self._greeted(ray, placed, on_progress)
                return placed
            except ray.exceptions.RayError as error:
                self._drop(ray, placed)
                made = CREATION not in str(error)
                if self._closed or not made or time.monotonic() - began > self._placement_timeout_s:
                    raise self._buried(placed, error) from error
            except BaseException:
                self._drop(ray, placed)
                raise

    def _begin(self) -> None:
        self._placing = threading.Thread(target=self._place_quietly, daemon=True, name=f"place-{self.name}")
        self._placing.start()

    def _place_quietly(self) -> None:
        with suppress(EngineError):
            if not self._closed:
                with self._cluster.used() as ray:
                    self._place(ray)

    def _place(self, ray: Any) -> Placed:
        with self._lock:
            if self._closed:
                raise EngineClosed(f"engine {self.name!r} is closed: call start() first")
            if self._placed is None:
                options = {OPTIONS[name]: count for name, count in self._resources.items() if name in OPTIONS}
                others = {name: count for name, count in self._resources.items() if name not in OPTIONS}
                made = ray.remote(EngineHost).options(
                    **{"num_cpus": 0, **options}, resources=others, max_concurrency=2, runtime_env=KEEP_GUARDIAN
                )
                actor = made.remote(self._blueprint)
                self._placed = Placed(actor, actor.prepare.remote())
            return self._placed

    def _greeted(self, ray: Any, placed: Placed, on_progress: OnProgress) -> Greeting:
        """What the actor says when it is up. Raises RayUnavailable where no node can have it, or its code is other."""
        began = said = time.monotonic()
        while not ray.wait([placed.prepared], timeout=POLL_S)[0]:
            now = time.monotonic()
            if now - began > self._placement_timeout_s:
                raise RayUnavailable(
                    f"engine {self.name!r}: for {self._placement_timeout_s:g} s no node of the Ray cluster had "
                    f"{shown(self._resources)} free. {inventory(ray)}. Start a node that has it (ray start "
                    "--address=HOST:PORT --resources=JSON), or ask for less"
                )
            if now - said > SAY_EVERY_S:
                said = now
                on_progress(EngineProgress(self.name, f"waiting for a node with {shown(self._resources)}", 0, 0, ""))
        outcome: Outcome = ray.get(placed.prepared)
        greeting: Greeting = outcome.value
        if outcome.error is not None:
            problem = f"{type(outcome.error).__name__}: {outcome.error}"
            passing = isinstance(outcome.error, OSError)  # no process, or no space for a log, as for an engine here
            raise RayUnavailable(
                f"engine {self.name!r} cannot work on node {greeting.node}: {problem}", retryable=passing
            )
        ours = self._facts
        other = [name for name in ours if greeting.facts.get(name) != ours[name]]
        if other:
            differences = ", ".join(f"{name} {greeting.facts.get(name)} instead of {ours[name]}" for name in other)
            raise RayUnavailable(
                f"engine {self.name!r}: node {greeting.node} has other code than this machine ({differences}): install "
                "the same version of ppoflow on all machines"
            )
        self._note(f"{greeting.node}, process {greeting.pid}")
        return greeting

    def _watched(self, ray: Any, placed: Placed, job: Any, on_progress: OnProgress) -> Outcome:
        """The job's outcome; hands on what the engine reports meanwhile."""
        question, heard = placed.actor.progress.remote(), time.monotonic()
        while not ray.wait([job], timeout=POLL_S)[0]:
            if ray.wait([question], timeout=0)[0]:
                for progress in ray.get(question):
                    on_progress(progress)
                question, heard = placed.actor.progress.remote(), time.monotonic()
            elif time.monotonic() - heard > HOST_SILENCE_S:
                raise EngineDied(
                    f"engine {self.name!r}: its actor on {placed.place} did not answer for {HOST_SILENCE_S:g} s, "
                    "so it was ended; the next try places a new one"
                )
        outcome: Outcome = ray.get(job)
        return outcome

    def _buried(self, placed: Placed, error: Exception) -> EngineError:
        if self._closed:
            return EngineClosed(f"engine {self.name!r} was closed before its job ended")
        if placed.greeting is None and CREATION in str(error):
            return RayUnavailable(
                f"engine {self.name!r}: the actor could not be made: {reason(error)}. Is ppoflow installed on every "
                "node, in the environment that `ray start` was called from?"
            )
        self._begin()  # it comes up while the flow waits before its retry
        return EngineDied(
            f"engine {self.name!r}: {placed.place} was lost: {reason(error)}. The next try goes to any node with "
            f"{shown(self._resources)}"
        )

    def _drop(self, ray: Any, placed: Placed) -> None:
        with self._lock:
            if self._placed is placed:
                self._placed = None
        with suppress(ray.exceptions.RayError):
            ray.kill(placed.actor)

    def _note(self, where: str) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            log.write(f"{datetime.now().isoformat(timespec='seconds')} engine {self.name} is on node {where}\n")


def shown(resources: Mapping[str, float]) -> str:
    """`GPU: 1, rollout: 2`"""
    return ", ".join(f"{name}: {count:g}" for name, count in sorted(resources.items())) or "no resources"


def inventory(ray: Any) -> str:
    """What each node has that is alive."""
    listed = []
    for node in ray.nodes():
        if node["Alive"]:
            has = {k: v for k, v in node["Resources"].items() if not k.startswith(("node:", "object_store", "memory"))}
            listed.append(f"{node['NodeManagerAddress']} ({shown(has)})")
    return f"It has {len(listed)} nodes: {', '.join(listed)}"


def reason(error: Exception) -> str:
    """Ray's explanation in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [
        line for line in lines if line.startswith(("The actor is dead because", "The node", "ModuleNotFoundError"))
    ]
    return (known or lines or [type(error).__name__])[-1]
