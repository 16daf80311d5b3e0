"""Everything a run's tasks work with: the spec, the store, the records, the engines, the tracker."""

from __future__ import annotations

import inspect
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.export import digests_of_source
from infra.artifacts.fingerprint import code_fingerprint
from infra.backend import open_collector, open_records
from infra.engines.protocol import Engine, EngineInput, EngineJob, EngineProgress, EngineTimeout, OnProgress
from infra.engines.relay import SpareTime
from infra.gc.collector import Collector
from infra.mlflow.circuit_breaker import CircuitBreaker
from infra.mlflow.tracking import RunTracker
from infra.runs.lease import Heartbeat, Lease
from infra.runs.records import RunRecords
from infra.runs.tracked_as import note_tracking_id
from infra.settings import Settings
from ppo_core import records
from ppo_core.records import FILES_OF, InputError, content_digest
from ppo_core.spec import RunSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.paths import is_function
from tasks.stages.dataset_job import data_digest
from tasks.stages.early_engines import engines_of
from tasks.stages.engines import PROGRAMS, Engines, LocalHandle, require_shared_store
from tasks.stages.holding import held
from tasks.stages.hub_names import Downloads, Spec, hub_sources
from tasks.stages.jobs import StageJob, StageResult, all_done, ask
from tasks.stages.reporting import Reporting
from tasks.stages.timings import Timings

BACK_OFF_S = 30.0


@dataclass(frozen=True)
class RunContext:
    """One run's means. Tasks get it as their first argument; Prefect never stores it.

    Without a `lease` the run's records can be read only.
    """

    spec: RunSpec
    run: str
    settings: Settings
    store: ArtifactStore
    records: RunRecords
    engines: Engines
    tracker: RunTracker
    on_progress: OnProgress
    lease: Lease | None = None
    timings: Timings = field(default_factory=Timings)
    fingerprints: dict[str, str] = field(default_factory=dict)
    source_digests: dict[str, str] = field(default_factory=dict)
    folder_digests: dict[str, str] = field(default_factory=dict)
    prefect_breaker: CircuitBreaker = field(
        default_factory=lambda: CircuitBreaker(BACK_OFF_S, is_outage=lambda error: True)
    )
    reported: set[int] = field(default_factory=set)
    reporting: Reporting = field(default_factory=Reporting)
    released: set[tuple[str, str]] = field(default_factory=set)
    preparing: dict[str, Future[Any]] = field(default_factory=dict)
    scoring_spare: SpareTime = field(default_factory=SpareTime)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def with_spec(self, spec: RunSpec) -> RunContext:
        """The same means for work under another spec of the run."""
        return replace(self, spec=spec)

    @cached_property
    def collector(self) -> Collector:
        """The collector of the store."""
        return open_collector(self.store.root)

    def fingerprint(self, engine: str) -> str:
        """Of the code that runs in an engine."""
        with self.lock:
            if engine not in self.fingerprints:
                root = Path(inspect.getfile(records)).parents[1]
                self.fingerprints[engine] = code_fingerprint(PROGRAMS[engine], root)
            return self.fingerprints[engine]

    def pin(self, kind: str, key: str) -> None:
        """Keep an artifact from being collected until a record names it, or the run ends."""
        self.released.discard((kind, key))
        if self.lease is not None:
            self.lease.pin(kind, key)

    def supersede(self, after: int) -> list[int]:
        """Take the records after iteration `after` out of the run; what is done instead is reported anew."""
        taken = self.records.supersede(after)
        self.reported.difference_update(taken)
        self.reporting.forget(taken)
        return taken

    @cached_property
    def downloads(self) -> Downloads:
        """What of the hub is in the store."""
        return Downloads(self.store)

    def hub_inputs(self, *names: str) -> dict[str, EngineInput]:
        """Those of `names` that are of the hub, as inputs of engines that read them by their names."""
        return {name: self._downloaded(name) for name in names if is_hub_name(name)}

    def _downloaded(self, name: str) -> EngineInput:
        found = self.downloads.of(hub_sources(self.spec)[name])
        if found is None:
            raise InputError(f"{name} is not in the store {self.store.root}: give the run's command again")
        return found

    def path(self, name: str) -> Path:
        """A path of the spec; relative ones start at the spec's folder."""
        return Path(self.spec.folder) / name

    def sources(self, *names: str | None) -> EngineInput:
        """The folder of the user's code and data, with the digests of the pieces `names` that a stage uses."""
        with self.lock:
            if not {name for name in names if name} <= set(self.source_digests):
                self.source_digests.update(self._describe_sources())
            used = {name: self.source_digests[name] for name in names if name}
            return EngineInput(Path(self.spec.folder).absolute(), content_digest(used))

    def rewards(self) -> dict[str, EngineInput]:
        """What the rewards need: `sources`, their functions and folders of reward models, and those of the hub.

        Where there are such models, the functions alone are `functions`, and each folder is an input, by which the
        engine tells whether its files are still those.
        """
        functions, models = self.sources(*self.spec.reward.code), self.spec.reward.folders
        if not models:
            return {"sources": functions}
        given = {name: self.folder_input(name) for name in models}
        digests = {name: folder.digest for name, folder in given.items()}
        named = replace(functions, digest=content_digest([functions.digest, digests]))
        own = {FILES_OF + name: folder for name, folder in given.items() if not is_hub_name(name)}
        return {"sources": named, "functions": functions, **own, **self.hub_inputs(*models)}

    def folder_input(self, name: str) -> EngineInput:
        """A folder on disk, or a download, as an engine's input."""
        if is_hub_name(name):
            return self._downloaded(name)
        folder = self.path(name)
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}: give a path relative to the spec, or an absolute one")
        with self.lock:
            if name not in self.folder_digests:
                self.folder_digests[name] = content_digest(digests_of_source(folder))
            return EngineInput(folder.absolute(), self.folder_digests[name])

    def tokenizer(self) -> EngineInput:
        """Where the tokenizer lies."""
        model = self.spec.model
        return self.folder_input(str(model.tokenizer or model.path))

    def model_inputs(self) -> dict[str, EngineInput]:
        """The starting model's folder, where the spec names one."""
        return {"model": self.folder_input(self.spec.model.path)} if self.spec.model.path else {}

    def run_job(self, engine: str, stage_job: StageJob, on_progress: OnProgress | None = None) -> StageResult:
        """Have one of the run's engines do what a stage asks for; see `tasks.stages.jobs`."""
        silence = self.spec.engines.reward_timeout_s if engine == "scoring" else self.spec.engines.timeout_s
        on_progress = on_progress or self.on_progress
        on_progress(EngineProgress(engine, stage_job.job, 0, 0, ""))  # the engine may have to start first
        handle = self.engines.handles[engine]
        with self._free(engine) as waited_s:
            sent = time.perf_counter()
            try:
                if self.engines.turns.sides:
                    with self.timings.outside("turns"):
                        self.timings.freed(self.engines.turns.take(engine, silence_s=silence, on_progress=on_progress))
                    sent = time.perf_counter()
                done = handle.run_job(stage_job, self.store, silence_s=silence, on_progress=on_progress)
            except EngineTimeout as error:
                key = "reward_timeout_s" if engine == "scoring" else "timeout_s"
                message = f"{error} (the spec's engines.{key}={silence:g})"
                raise EngineTimeout(message, retryable=error.retryable) from None
        hops_s = time.perf_counter() - sent - done.engine_s - done.store_s
        return replace(done, engine_s=done.engine_s + waited_s, hops_s=hops_s)

    def can_prepare(self, engine: str) -> bool:
        """Whether there is such an engine on this machine, which has not been asked to prepare anything."""
        return isinstance(self.engines.handles.get(engine), LocalHandle) and engine not in self.preparing

    def prepare(self, engine: str, job: EngineJob) -> None:
        """Have an engine that can do, beside all else, what its next job would have to do otherwise.

        That job waits for the end. A failure is no error: the job then meets it, and says so. Ends with the engines.
        """
        handle = self.engines.handles[engine]
        assert isinstance(handle, LocalHandle)
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"prepare-{engine}")
        self.preparing[engine] = pool.submit(_prepare, handle.engine, job, self.spec.engines.timeout_s)
        pool.shutdown(wait=False)

    @contextmanager
    def _free(self, engine: str) -> Iterator[float]:
        """The engine when it has prepared itself, and does nothing ahead; the seconds that it took still."""
        began, preparing = time.perf_counter(), self.preparing.pop(engine, None)
        if preparing is not None:
            all_done({engine: preparing})
        with self.scoring_spare.claimed() if engine == "scoring" else nullcontext():
            yield time.perf_counter() - began

    def _describe_sources(self) -> dict[str, str]:
        spec = self.spec
        digests: dict[str, str] = {}
        if code := [*spec.code, *filter(is_function, spec.data)]:
            sources = {"sources": EngineInput(Path(spec.folder).absolute(), "")}
            job = EngineJob("describe_sources", sources, None, {"functions": code})
            silence = spec.engines.reward_timeout_s
            digests |= ask(self.engines.scoring, job, silence_s=silence, on_progress=self.on_progress).result
        for name in spec.data:
            if is_hub_name(name):
                digests[name] = self._downloaded(name).digest
            elif not is_function(name):
                digests[name] = data_digest(self.path(name))
        return digests


C = TypeVar("C", bound=RunContext)


@contextmanager
def open_run_context(
    kind: type[C],
    spec: Spec,
    run: str,
    on_progress: OnProgress,
    effective: Callable[[Spec, RunRecords], Spec] | None = None,
    *,
    held_as: str | None = None,
    note: Mapping[str, str] = {},
    wait: bool = False,
    keep: Callable[[], bool] | None = None,
) -> Iterator[C]:
    """Open a run's means, with engines that are not started; everything is closed on the way out, whatever happens.

    The run belongs to this process alone meanwhile: LeaseHeld where another one has it (with `wait`, only after that
    one has ended), LeaseLost where this one was silent for too long and another took over. `note` is what the next
    holder should know of this one: it gets to know it if `keep` says at the end that the run is not to be released.
    `effective` makes the spec that the run really has of the one requested and the run's records. `held_as` is the name
    of the lease, and of the records, where it is not the run's.
    """
    settings = Settings()
    require_shared_store(spec, settings.store_root)
    store, name = open_store(settings.store_root), held_as or run
    closing = ExitStack()
    # The heart beats from here on: to find out the spec, a slow hub may be asked, or many records read.
    with held(store.root, name, note=note, wait=wait, keep=keep) as lease, Heartbeat(lease, on_lost=closing.close):
        records = open_records(store.root, name, lease=lease)
        spec = effective(spec, records) if effective is not None else spec
        engines = engines_of(spec, settings, name)
        artifacts, tracked_as = settings.mlflow_folder / "artifacts", note_tracking_id(records)
        tracker = RunTracker(settings.tracking_uri, spec.name, run, artifacts, tracked_as)
        context = kind(cast(RunSpec, spec), run, settings, store, records, engines, tracker, on_progress, lease)
        closing.callback(engines.close)
        with working(context):
            yield context


@contextmanager
def working(context: RunContext) -> Iterator[None]:
    """End the engines and the MLflow run as the work inside ends."""
    try:
        if context.lease is not None:
            context.lease.check()  # it may have been lost while there were no engines to close
        yield
    except BaseException as error:
        if context.lease is not None and isinstance(error, Exception):
            context.lease.check()  # engines that were closed because the run is another's now: say that instead
        if context.tracker.run_id is not None:
            context.tracker.finish("FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    finally:
        context.reporting.close()
        context.engines.close()


def _prepare(engine: Engine, job: EngineJob, silence_s: float) -> None:
    try:
        engine.run(job, timeout_s=silence_s)
    finally:
        if job.output is not None:
            shutil.rmtree(job.output, ignore_errors=True)
