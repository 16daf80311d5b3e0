"""What is found damaged of runs and of a store, and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from infra.artifacts import ArtifactCorrupted, ArtifactError, ArtifactMissing, ArtifactRef, ArtifactStore
from infra.runs.names import TRACKING
from infra.runs.records import RecordError, RecordFormatTooNew, RunRecords, remedy_for
from infra.storage.rereading import ChangedOnTheWay
from tasks.runs.iteration_record import NEWER, ChainedRecord, IterationRecord, RecordOfNewerVersion
from tasks.runs.notes import (
    CHANGES,
    DIVERGENCES,
    NOTED_AGAIN,
    RERUNS,
    ROLLBACKS,
    Divergence,
    Rollback,
    divergences_of,
    lost_rollbacks,
    noted_changes,
    reruns_of,
    rollbacks_of,
)
from tasks.runs.reachability import Name
from tasks.runs.record_chain import LastRecordLost, LastRecordReplaced, link

Repair = Literal["spec", "records", "notes", "artifact", "set aside", "copy"]

WRITTEN_LATER = (RecordFormatTooNew, RecordOfNewerVersion)


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was written, and what helps; without a `repair`, only a person can.

    `repair` says what is done: the spec is written again; the records from `iteration` on are taken out of the run;
    notes of rollbacks that the records tell of are written again; the artifact `ref` of that iteration is made again,
    or, where nothing needs it or a command makes it again, set aside; the copy of the best policy is made again.
    """

    what: str
    complaint: str
    remedy: str
    repair: Repair | None = None
    iteration: int = 0
    ref: ArtifactRef | None = None


@dataclass
class Findings:
    """What was read of a run (or, without one, of the rest of the store), and what of it is damaged.

    `records` counts pages too. A run `releases` checkpoints where any of its records has a retention. `rollbacks`
    None: they cannot be read; those that are `lost` the records tell of. Of a run with a document of a `newer` version
    nothing is repaired. `evidence` are the records of diverged iterations.
    """

    run: str | None
    damages: list[Damage] = field(default_factory=list)
    records: int = 0
    artifacts: int = 0
    bytes: int = 0
    releases: bool = False
    rollbacks: dict[str, Rollback] | None = None
    lost: list[Rollback] = field(default_factory=list)
    newer: bool = False
    evidence: list[IterationRecord] = field(default_factory=list)
    divergences: dict[str, Divergence] = field(default_factory=dict)

    @property
    def names(self) -> set[Name]:
        """Kind and key of the artifacts that are damaged."""
        return {(damage.ref.kind, damage.ref.key) for damage in self.damages if damage.ref is not None}

    def leave_newer(self) -> None:
        """Where a newer version has written, nothing is repaired: what it has written besides must stay as it is."""
        if self.newer:
            self.damages = [replace(damage, repair=None, remedy=NEWER) for damage in self.damages]

    def to_repair(self, repair: Repair) -> list[Damage]:
        """The damages that are repaired in this way."""
        return [damage for damage in self.damages if damage.repair == repair]


def of_record(run: str, iteration: int, error: RecordError | str) -> Damage:
    """A record from which on those of the run are taken out of it."""
    return Damage(f"record of iteration {iteration}", str(error), remedy_for(run, iteration), "records", iteration)


def of_last(run: str, records: int, error: RecordError) -> Damage:
    """What is wrong with a run's last record, or with what names it."""
    if isinstance(error, LastRecordLost | LastRecordReplaced):
        return of_record(run, error.first, error)
    return Damage("last.json", str(error), remedy_for(run, "last"), "records", records)


def check_notes(records: RunRecords, believed: list[ChainedRecord], found: Findings) -> None:
    """The notes of a run, and that its records tell of no rollback that they do not."""
    run = records.run
    with _reading_notes(found, DIVERGENCES):
        found.divergences = divergences_of(records)
        for one in found.divergences.values():
            if one.record is not None:
                found.evidence.append(link(run, one.record, remedy=remedy_for(run, DIVERGENCES)).record)
    with _reading_notes(found, TRACKING):
        records.notes(TRACKING)
    with _reading_notes(found, RERUNS):
        for note in reruns_of(records):
            if note.record is not None:
                link(run, note.record, remedy=remedy_for(run, RERUNS))
    with _reading_notes(found, CHANGES):
        noted_changes(records, -1)
    with _reading_notes(found, ROLLBACKS):
        found.rollbacks = rollbacks_of(records)
        found.lost = lost_rollbacks(run, believed, found.rollbacks, found.divergences.values())
    for missing in found.lost:
        complaint = f"run {run} went back to iteration {missing.after}, as its records tell, and no note says so"
        remedy = f"`ppoflow fsck {run} --repair`, or {NOTED_AGAIN}"
        found.damages.append(Damage(f"notes of {ROLLBACKS}", complaint, remedy, "notes"))


@contextmanager
def _reading_notes(found: Findings, kind: str) -> Iterator[None]:
    """Notes of a kind that cannot be read in the block are a damage."""
    try:
        yield
    except (RecordError, ChangedOnTheWay, OSError) as error:
        found.newer = found.newer or isinstance(error, WRITTEN_LATER)
        found.damages.append(Damage(f"notes of {kind}", str(error), ""))


def is_sound(
    store: ArtifactStore, found: Findings, ref: ArtifactRef, damage: Damage, *, may_be_gone: bool = False
) -> bool:
    """Whether an artifact is; where it is not, `damage` is found, with the complaint."""
    try:
        found.bytes += store.check(ref)
        return True
    except (ArtifactCorrupted, ArtifactMissing) as error:
        if may_be_gone and isinstance(error, ArtifactMissing):
            return False  # of another run it may be missed
        found.damages.append(replace(damage, complaint=str(error)))
    except (ArtifactError, ChangedOnTheWay, OSError) as error:
        found.damages.append(replace(damage, complaint=str(error), remedy="", repair=None))
    return False
