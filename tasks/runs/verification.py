"""Making an iteration again from its recorded inputs, in a scratch store, and comparing digests stage by stage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pydantic import BaseModel, ConfigDict

from infra.artifacts import ArtifactMissing, ArtifactRef, open_store
from infra.artifacts.local_store import LocalStore
from infra.artifacts.overlay_store import OverlayStore
from infra.backend import open_records
from infra.engines.protocol import OnProgress
from infra.mlflow.tracking import RunTracker
from infra.runs.records import RunRecords
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.retention import VERIFY
from tasks.runs.run_state import committed, require_start, spec_of_run
from tasks.stages.context import RunContext, working
from tasks.stages.engines import Engines


class Comparison(BaseModel):
    """A stage's digest as the record has it, and as it came out now."""

    model_config = ConfigDict(frozen=True)

    iteration: int
    stage: str
    recorded: str
    found: str

    @property
    def same(self) -> bool:
        """Whether the stage gave the same bytes."""
        return self.recorded == self.found


def compared(iteration: int, stage: str, recorded: ArtifactRef, found: ArtifactRef) -> Comparison:
    """One stage's comparison."""
    return Comparison(iteration=iteration, stage=stage, recorded=recorded.digest, found=found.digest)


def check_recorded(context: RunContext, record: IterationRecord) -> None:
    """Raise ArtifactCorrupted where what the run's store has of an iteration is not, byte for byte, what was recorded.

    What retention has removed is not looked for.
    """
    store = open_store(context.settings.store_root, cache=context.settings.cache_folder)
    for ref in (*record.downloads, record.dataset, *record.artifacts.values()):
        with suppress(ArtifactMissing):
            store.fetch(ref.bare())


@contextmanager
def open_verification(run: str, folder: str | None, on_progress: OnProgress) -> Iterator[RunContext]:
    """A context with the run's spec and records, fresh engines, and a scratch store over the run's own.

    The scratch store is a folder of this machine, so the engines are here too, wherever those of the run were.
    """
    if (lost := committed(run).lost_last) is not None:
        raise lost
    spec = spec_of_run(run, folder).with_overrides(["engines.backend=local"])
    settings = Settings()
    # Named after this process, so that it is found once that is gone.
    scratch = LocalStore(settings.home / VERIFY).scratch()
    # What this machine has kept of a remote store says nothing of what that store has.
    settings = settings.model_copy(update={"cache": scratch / "cache"})
    original = open_store(settings.store_root, cache=settings.cache_folder)
    try:
        context = RunContext(
            spec=spec,
            run=run,
            settings=settings,
            store=OverlayStore(open_store(scratch / "store"), original),
            records=open_records(original.root, run),
            engines=Engines(spec, settings, settings.run_folder(run) / "verify-logs"),
            tracker=RunTracker(settings.tracking_uri, spec.name, run, settings.mlflow_folder / "artifacts"),
            on_progress=on_progress,
        )
        with working(context):
            yield context
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def require_verifiable(run: str, iterations: str | None, folder: str | None) -> None:
    """Raise InputError before anything is started: an unknown run, or iterations that it does not have, or of which
    retention has let go what the first one starts from."""
    spec_of_run(run, folder)
    chosen = chosen_iterations(open_records(open_store(Settings().store_root).root, run), iterations)
    require_start(committed(run).records, chosen[0], "verify")


def chosen_iterations(records: RunRecords, wanted: str | None) -> range:
    """`3..5`, `4` or everything. Raises InputError for what the run does not have, naming what it has."""
    have = records.iterations()
    if not have:
        raise InputError(f"run {records.run} has no committed iteration")
    first, dots, last = (wanted or f"{have[0]}..{have[-1]}").partition("..")
    try:
        chosen = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise InputError(f"iterations {wanted!r}: write FIRST..LAST or one number, for example 3..5") from None
    if not chosen:
        raise InputError(f"iterations {wanted}: the first comes after the last; write FIRST..LAST, for example 3..5")
    if chosen[0] < have[0] or chosen[-1] > have[-1]:
        raise InputError(f"iterations {wanted}: run {records.run} has {have[0]}..{have[-1]}")
    return chosen
