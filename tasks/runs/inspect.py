"""Where a run stands, read from its records, and what its process does now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from infra.artifacts import ArtifactError, open_store
from infra.backend import open_records
from infra.runs.listing import RunListing
from infra.runs.records import RunRecords
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from tasks.runs.iteration_record import IterationRecord, best_in_words
from tasks.runs.notes import NOTED_AGAIN, NotedRerun, Rollback, pending_rerun, reruns_of
from tasks.runs.progress import doing_now
from tasks.runs.record_chain import LastRecordLost, unless_changed
from tasks.runs.run_state import changes_after, command_again, committed, is_done, made_by_preferences
from tasks.stages.references import CheckpointRef


@dataclass(frozen=True)
class RunSoFar:
    """A run's records, how many iterations it is meant to have and where its last checkpoint lies.

    `lost` are the rollbacks that no note of the run tells any more; `lost_last` says that its last records are gone.
    `rerun` is one that is being done, or was broken off.
    """

    run: str
    records: list[IterationRecord]
    iterations: int
    location: str
    lost: tuple[Rollback, ...] = ()
    lost_last: LastRecordLost | None = None
    rerun: NotedRerun | None = None

    def summary(self) -> str:
        """Position and best policy in a few lines."""
        last = self.records[-1]
        return "\n".join(
            [
                f"run {self.run}: iteration {last.iteration} of {self.iterations}, data at {last.cursor}",
                f"  {best_in_words(last.best, self.records[last.best.iteration].metrics)}",
                f"  checkpoint         {self.location}",
                *([] if self.rerun is None else [_being_done(self.rerun)]),
                *(f"! the note of its rollback to iteration {one.after} is lost: {NOTED_AGAIN}" for one in self.lost),
                *([] if self.lost_last is None else [f"! {self.lost_last}"]),
            ]
        )


def records_of(run: str) -> RunRecords:
    """Those of a run, to be read."""
    return open_records(open_store(Settings().store_root).root, run)


def reruns_done(run: str, iteration: int, start: str) -> int:
    """How often an iteration of a run was done again from this stage on, to its end."""
    records = records_of(run)
    return sum(one.ended and (one.iteration, one.start) == (iteration, start) for one in reruns_of(records))


@dataclass(frozen=True)
class Completion:
    """Whether a run has all of its iterations, and none that is to be done again; what its records are; and how often
    the iteration that is asked for was done again: None where none is."""

    is_done: bool
    records: RunListing
    reruns: int | None

    @classmethod
    def of(cls, spec: RunSpec, run: str, rerun: tuple[int, str] | None) -> Self:
        """Of a run as its records have it now. `rerun`: an iteration and its stage to begin with."""
        records = records_of(run)
        done = is_done(spec, run) and unless_changed(records, lambda _: pending_rerun(records)) is None
        return cls(done, records.contents(), None if rerun is None else reruns_done(run, *rerun))

    def reached_since(self, before: Completion) -> bool:
        """Whether the run came to its end, and the rerun that is asked for was done, after that time."""
        again = self.reruns is None or before.reruns is None or self.reruns > before.reruns
        return self.is_done and self.records != before.records and again


def read_run(run: str) -> RunSoFar:
    """The run of this name. Raises InputError for one without records, naming those there are."""
    chain = committed(run, notes=True)
    assert chain.spec is not None
    last, records = chain.records[-1], records_of(run)
    planned = int(changes_after(records, last).get("iterations", chain.spec["iterations"]))
    location = location_of(last.checkpoint)
    planned = max(planned, last.iteration)
    pending = unless_changed(records, lambda _: pending_rerun(records))
    return RunSoFar(run, chain.records, planned, location, chain.lost_rollbacks, chain.lost_last, pending)


def _being_done(rerun: NotedRerun) -> str:
    again = f"iteration {rerun.iteration} is being done again from stage {rerun.start}"
    return f"  rerun              {again}; if its process died, the next start finishes that"


def read_status(run: str) -> tuple[RunSoFar | None, list[str]]:
    """The run of this name, and in lines what was learned from preferences and what its process does now.

    Of a run that was ended before its first record, and that no process has, which command goes on with it. Raises
    InputError where there is nothing of all that.
    """
    settings = Settings()
    places = {"reward model": settings.reward_model_folder(run), "DPO policy": settings.dpo_policy_folder(run)}
    trained = [f"  {made:<18} {place}" for made, place in places.items() if (place / "config.json").is_file()]
    doing = doing_now(run)
    now = [*trained, *doing]
    try:
        return read_run(run), now
    except InputError:
        root = open_store(settings.store_root).root
        only = None if doing else made_by_preferences(run, root)
        again = None if doing or only else command_again(run, root)
        if again is not None:
            now.append(f"  continue           {again}; finished work is kept")
        if not now:
            raise
        return None, [only or f"run {run}: no iteration is committed yet", *now]


def location_of(checkpoint: CheckpointRef) -> str:
    """Where the store has a checkpoint now: a store may have moved since the record was written."""
    store = open_store(Settings().store_root)
    try:
        return store.location(checkpoint.bare())
    except ArtifactError as error:
        return f"{checkpoint.kind}/{checkpoint.key} cannot be had ({error})"
