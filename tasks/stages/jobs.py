"""A stage's job as plain data, so that it can be done wherever its engine is.

    the flow                          beside the engine: in this process, or on another machine
    StageJob ──────────────────────► fetch the inputs, run the engine's job into a scratch folder,
    StageResult (ref, facts) ◄───── finish it, write its stats.json, put it into the store

Only this crosses: a job and its result. Artifacts go through the store.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from infra.artifacts import ArtifactError, ArtifactRef, ArtifactStore
from infra.engines.protocol import (
    Engine,
    EngineError,
    EngineInput,
    EngineJob,
    EngineJobError,
    EngineProgress,
    EngineReply,
    OnProgress,
)
from infra.storage.objects import StoreUnavailable
from ppo_core.records import FORGET, InputError

STATS = "stats.json"
FULL_BYTES = 4 << 20
"""A disk with less is full: the smallest artifacts, logs and tables need more."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
MAKE_ROOM = (
    "make room (ppoflow gc; checkpoint.keep_last and checkpoint.every make runs smaller), "
    "then start the same command again"
)
K = TypeVar("K")
T = TypeVar("T")
LOOK_S = 1.0
"""So often a waiting main thread looks for Ctrl-C: a signal that another thread got does not wake it."""
FETCH_AGAIN_S = 600.0
"""A third of the time for which a fetched copy is sure to stay."""


@dataclass(frozen=True)
class UploadedSource:
    """A folder of the user's that was stored to reach another machine; the engine gets the folder's own digest."""

    ref: ArtifactRef
    digest: str


@dataclass(frozen=True)
class StageJob:
    """What to make, of what, and what to store it as. Survives pickling.

    `inputs` are artifacts to fetch; `folders` lie on the engine's machine already, or are uploaded. `lineage` is what
    the stored artifact names as its inputs. `finish`, a function of a module, completes what the engine made. With
    `reports_rows` the engine's progress has the rows that are finished, which changes nothing in what is made. An
    engine that goes on with what it `holds` of this job forgets it where the store has another one.
    """

    job: str
    spec: Mapping[str, Any]
    kind: str
    key: str
    inputs: Mapping[str, ArtifactRef] = field(default_factory=dict)
    folders: Mapping[str, EngineInput | UploadedSource] = field(default_factory=dict)
    lineage: tuple[ArtifactRef, ...] = ()
    finish: Callable[[Path], None] | None = None
    reports_rows: bool = False
    holds: bool = False


@dataclass(frozen=True)
class StageResult:
    """The artifact made, what the engine says of it, and the seconds: in the engine, with the store, on the way.

    Those on the way only the sender knows.
    """

    ref: ArtifactRef
    result: dict[str, Any]
    engine_s: float
    store_s: float
    hops_s: float = 0.0


def run_job(
    stage_job: StageJob, store: ArtifactStore, engine: Engine, *, silence_s: float, on_progress: OnProgress | None
) -> StageResult:
    """Run the job into a new folder and store it; after a failure the folder is gone.

    Where another process has stored its own under the same key meanwhile, that one counts, and what was said of it.
    """
    started = time.perf_counter()
    inputs = {name: EngineInput(store.fetch(ref), ref.digest) for name, ref in stage_job.inputs.items()}
    uploaded = {name: given.ref for name, given in stage_job.folders.items() if isinstance(given, UploadedSource)}
    fetched = {**stage_job.inputs, **uploaded}
    for name, given in stage_job.folders.items():
        inputs[name] = EngineInput(store.fetch(given.ref), given.digest) if isinstance(given, UploadedSource) else given
    output = store.scratch()
    try:
        asked = time.perf_counter()
        job = EngineJob(stage_job.job, inputs, output, stage_job.spec, stage_job.reports_rows)
        reply = ask(engine, job, silence_s=silence_s, on_progress=keeping(output, fetched, store, on_progress))
        answered = time.perf_counter()
        if stage_job.finish is not None:
            stage_job.finish(output)
        stats = json.dumps(reply.result, indent=2, sort_keys=True) + "\n"
        (output / STATS).write_text(stats)
        ref = store.put(output, stage_job.kind, stage_job.key, stage_job.lineage)
        stored = (store.fetch(ref) / STATS).read_text()
        if stored != stats and stage_job.holds:
            ask(engine, EngineJob(FORGET, {}, None, {}), silence_s=silence_s)
    except (EngineError, OSError) as error:
        check_room(output, stage_job.job, error)
        raise
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return StageResult(
        ref,
        json.loads(stored),
        engine_s=reply.seconds,
        store_s=asked - started + time.perf_counter() - answered,
    )


def keeping(
    output: Path, inputs: Mapping[str, ArtifactRef], store: ArtifactStore, on_progress: OnProgress | None
) -> OnProgress:
    """`on_progress`, which now and then fetches the inputs again besides: a replay reads some of its own after hours.

    Copies of a remote store's artifacts that were fetched long ago may go: see `infra.artifacts.download_cache`. So may
    a folder of work that nobody has touched for a day, whose process another machine cannot see: `output` is touched.
    """
    fetched = time.monotonic()

    def tell(progress: EngineProgress) -> None:
        nonlocal fetched
        if time.monotonic() - fetched >= FETCH_AGAIN_S:
            for ref in inputs.values():
                with suppress(ArtifactError, OSError, StoreUnavailable):  # a real loss the job meets by itself
                    store.fetch(ref)
            with suppress(OSError):
                os.utime(output)
            fetched = time.monotonic()
        if on_progress is not None:
            on_progress(progress)

    return tell


class DiskSpaceError(RuntimeError):
    """The next iteration would not fit on the disk, or this one did not."""


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Raise DiskSpaceError where the disk is full on which `what` is written inside."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskSpaceError(
            f"{what} could not be written to {error.filename} ({error.strerror}): {MAKE_ROOM}"
        ) from error


def check_room(place: Path, job: str, error: Exception) -> None:
    """Raise DiskSpaceError where a job failed and the disk that it wrote to is full: an engine can only have died."""
    free = shutil.disk_usage(place.parent).free  # the folder itself is gone once the store has it
    if free < FULL_BYTES or (isinstance(error, OSError) and error.errno in FULL):
        raise DiskSpaceError(
            f"{free / 2**20:.1f} MiB are free at {place.parent}, and job {job} failed there: {MAKE_ROOM}"
        ) from error


def ask(engine: Engine, job: EngineJob, *, silence_s: float, on_progress: OnProgress | None = None) -> EngineReply:
    """Have an engine do a job. Raises InputError (in the engine's words) for a user's mistake, else EngineError."""
    try:
        return engine.run(job, timeout_s=silence_s, on_progress=on_progress)
    except EngineJobError as error:
        if error.error_type == "InputError":
            raise InputError(error.reason) from None
        raise


def all_done(sent: Mapping[K, Future[T]]) -> Mapping[K, Future[T]]:
    """The same, when all have ended."""
    while wait(sent.values(), timeout=LOOK_S).not_done:
        continue
    return sent
