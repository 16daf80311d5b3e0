"""The engines of a run, and where each of them works. Heavy ones start early, side by side."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from infra.artifacts import ArtifactStore, open_store
from infra.backend import is_remote
from infra.engines.process import EngineProcess
from infra.engines.protocol import Engine, EngineJob, OnProgress
from infra.engines.ray import RayEngine
from infra.engines.ray_cluster import RayCluster
from infra.engines.ray_host import Blueprint
from infra.settings import Settings
from ppo_core.records import MAKE_ROOM, InputError
from ppo_core.spec.flow_spec import FlowSpec
from tasks.stages.engine_programs import (
    PROGRAMS,
    EnginePlan,
    code_facts,
    launch,
    launch_on_node,
    plan_engines,
    rollout_names,
)
from tasks.stages.jobs import StageJob, StageResult, ask, run_job

__all__ = ["PROGRAMS", "EngineHandle", "Engines", "LocalHandle", "RayHandle", "require_shared_store"]


class EngineHandle(Protocol):
    """A placed engine, which takes jobs. `reads_our_folders`: whether it is on this machine."""

    @property
    def reads_our_folders(self) -> bool: ...

    def start(self) -> None:
        """Begins to start the engine and returns at once."""

    def run_job(
        self, stage_job: StageJob, store: ArtifactStore, *, silence_s: float, on_progress: OnProgress
    ) -> StageResult:
        """Has the engine do it, and blocks until it is stored. `store` is the caller's own view of the run's store."""
        ...

    def close(self) -> None:
        """Ends the engine and everything below it."""


@dataclass(frozen=True)
class LocalHandle:
    """The engine is a child of this process."""

    engine: Engine
    reads_our_folders: ClassVar[bool] = True

    def start(self) -> None:
        """See `EngineHandle`."""
        self.engine.start()

    def run_job(
        self, stage_job: StageJob, store: ArtifactStore, *, silence_s: float, on_progress: OnProgress
    ) -> StageResult:
        """See `EngineHandle`."""
        return run_job(stage_job, store, self.engine, silence_s=silence_s, on_progress=on_progress)

    def close(self) -> None:
        """See `EngineHandle`."""
        self.engine.close()


@dataclass(frozen=True)
class RayHandle:
    """The engine is in an actor of a Ray cluster, which opens the store itself."""

    engine: RayEngine
    reads_our_folders: ClassVar[bool] = False

    def start(self) -> None:
        """See `EngineHandle`."""
        self.engine.start()

    def run_job(
        self, stage_job: StageJob, store: ArtifactStore, *, silence_s: float, on_progress: OnProgress
    ) -> StageResult:
        """See `EngineHandle`."""
        work = partial(_run_there, stage_job=stage_job, silence_s=silence_s)
        done: StageResult = self.engine.call(work, on_progress=on_progress)
        return done

    def close(self) -> None:
        """See `EngineHandle`."""
        self.engine.close()


def _run_there(
    store: ArtifactStore, engine: Engine, on_progress: OnProgress, *, stage_job: StageJob, silence_s: float
) -> StageResult:
    return run_job(stage_job, store, engine, silence_s=silence_s, on_progress=on_progress)


@dataclass
class Turns:
    """Who may hold memory of the GPUs now, where engines work there one after the other (`engines.placement`).

        rollout: generate ─► makes room                                            evaluate ─► generate ─► …
                                   training: advantages ─► update ─► makes room ─┘

    `sides` has the engines that work at the same time, by role. That of scoring is one where reward models compute on
    GPUs: it works between rollout and training.
    """

    sides: Mapping[str, Mapping[str, Engine]]
    holding: dict[str, Engine] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str, *, silence_s: float, on_progress: OnProgress | None = None) -> dict[str, float]:
        """Have every engine of the other side that worked since make room; returns what they freed, GiB by role.

        Raises EngineError where one of them fails; it holds nothing any more then, since its process is new.
        """
        mine = next((engines for engines in self.sides.values() if name in engines), None)
        if mine is None:
            return {}
        freed: dict[str, float] = {}
        with self.lock:
            for role, engines in self.sides.items():
                for other in sorted(engines.keys() & self.holding.keys() - mine.keys()):
                    job = EngineJob(MAKE_ROOM, {}, None, {})
                    reply = ask(self.holding.pop(other), job, silence_s=silence_s, on_progress=on_progress)
                    freed[role] = freed.get(role, 0.0) + float(reply.result["freed_gib"])
            self.holding[name] = mine[name]
        return freed


class Engines:
    """Starts all engines at once and ends them together.

    `handles` has every engine by its name, `rollout_names` are those that share an iteration's prompts; `scoring`,
    which runs the user's code in the user's folder, is always here. `turns` is to be asked before a job is given out.
    All are others after `serve`.
    """

    scoring: Engine
    rollout_names: list[str]
    handles: dict[str, EngineHandle]
    turns: Turns

    def __init__(self, spec: FlowSpec, settings: Settings, logs: Path, *, run: str = "") -> None:
        require_shared_store(spec, settings.store_root)
        self._settings, self._logs, self._run = settings, logs, run or spec.name
        self._lock, self._closed = threading.RLock(), False  # whoever loses the lease closes, in another thread
        self._make(spec)

    def serve(self, spec: FlowSpec) -> None:
        """Switch to the engines that another spec asks for: where they differ, these end, and new ones start with their
        first job. No job may be running meanwhile. Engines that were closed stay closed."""
        with self._lock:
            if not self._closed and asked_for(spec) != self._asked_for:
                self._end()
                self._make(spec)

    def _make(self, spec: FlowSpec) -> None:
        self._asked_for = asked_for(spec)
        settings, logs, plans = self._settings, self._logs, plan_engines(spec)
        scores = plans.pop("scoring")
        scoring = launch(scores, settings, logs)
        self._cluster = RayCluster(spec.engines.address)
        self.scoring = scoring
        self.rollout_names = rollout_names(spec)
        self.handles = {"scoring": LocalHandle(scoring)}
        sides: dict[str, dict[str, Engine]] = {"scoring": {"scoring": scoring}} if scores.takes_turns else {}
        for name, plan in plans.items():
            if spec.engines.backend == "ray":
                self.handles[name] = RayHandle(self._on_ray(plan, spec))
            else:
                engine = sides.setdefault(plan.role, {})[name] = launch(plan, settings, logs)
                self.handles[name] = LocalHandle(engine)
        self.turns = Turns(sides if any(plan.takes_turns for plan in plans.values()) else {})

    def _on_ray(self, plan: EnginePlan, spec: FlowSpec) -> RayEngine:
        resources, settings = resources_of(plan.role, spec), self._settings
        threads = settings.engine_threads or int(resources.get("CPU", 0)) or None
        return RayEngine(
            plan.name,
            self._cluster,
            Blueprint(
                partial(launch_on_node, plan=plan, run=self._run, threads=threads),
                partial(open_store, settings.store_root),
                partial(code_facts, plan.role),
            ),
            resources=resources,
            placement_timeout_s=spec.engines.placement_timeout_s,
            log=self._logs / f"{plan.name}.log",
        )

    def start(self, only: Collection[str] | None = None, *, checked: EngineProcess | None = None) -> None:
        """Start them, or `only` those of these names; they import while the caller goes on. One that is not started
        starts with its first job, and none once they are closed. The scoring engine is needed first, unless the process
        of `checked` can become it.

        RayUnavailable where there is no cluster: better now than after the first stage.
        """
        with self._lock:
            wanted = [name for name in self.handles if not self._closed and (only is None or name in only)]
            for name in sorted(wanted, key=lambda name: checked is not None and name == "scoring"):
                handle = self.handles[name]
                if not handle.reads_our_folders:
                    self._cluster.connect()
                if name == "scoring" and checked is not None and isinstance(self.scoring, EngineProcess):
                    self.scoring.take_over(checked)
                handle.start()

    def close(self) -> None:
        """End them and everything below them, all at once."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        with ThreadPoolExecutor(len(self.handles)) as pool:
            list(pool.map(lambda handle: handle.close(), self.handles.values()))
        self._cluster.close()


def asked_for(spec: FlowSpec) -> tuple[Any, ...]:
    """What a spec's engines are started with, and where. Specs for which this is equal can share engines."""
    plans = plan_engines(spec)
    if spec.engines.backend != "ray":
        return (plans,)
    placed = {name: resources_of(plan.role, spec) for name, plan in plans.items() if plan.role != "scoring"}
    return plans, spec.engines.address, placed


def resources_of(role: str, spec: FlowSpec) -> dict[str, float]:
    """What an engine asks of Ray: what the spec says, or the GPUs that it works with."""
    if role == "rollout":
        return spec.engines.rollout_resources or {"GPU": float(spec.engines.tensor_parallel_size)}
    return spec.engines.training_resources or {"GPU": float(spec.training.num_ranks)}


def require_shared_store(spec: FlowSpec, store_root: str) -> None:
    """Raise InputError where engines on other machines could not reach the store."""
    if spec.engines.backend == "ray" and not is_remote(store_root):
        raise InputError(
            f"engines.backend=ray with the store {store_root}: the engines run on other machines, which cannot reach a "
            "folder of this one. Set PPOFLOW_STORE=s3://BUCKET/PREFIX, here and on every node"
        )
