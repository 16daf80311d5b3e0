"""What is found damaged of runs and of a store, and what helps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from infra.artifacts import ArtifactCorrupted, ArtifactError, ArtifactMissing, ArtifactRef, ArtifactStore
from infra.runs.records import RecordError, remedy_for
from infra.storage.rereading import ChangedOnTheWay
from tasks.runs.iteration_record import NEWER, IterationRecord
from tasks.runs.notes import Divergence, Rollback
from tasks.runs.reachability import Name
from tasks.runs.record_chain import LastRecordLost, LastRecordReplaced

Repair = Literal["spec", "records", "notes", "artifact", "set aside", "copy"]


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
    except (ArtifactError, ChangedOnTheWay) as error:
        found.damages.append(Damage(damage.what, str(error), ""))
    return False
