"""The notes of a run: to where it was rolled back, what diverged, and what is done again. They and its records must say
the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.artifacts.manifest import sha256_of
from infra.runs.listing import RunListing
from infra.runs.records import RecordCorrupted, RunRecords, remedy_for
from tasks.runs.iteration_record import NEWER, Attempt, ChainedRecord, IterationRecord, RecordOfNewerVersion

ROLLBACKS, DIVERGENCES, RERUNS, CHANGES = "rollbacks", "divergences", "reruns", "changes"
NOTED_AGAIN = "the next start of the run writes it again, from the records"


class Note(BaseModel):
    """One of a run; None: an earlier version wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str | None = None


class Rollback(Note):
    """The run went back to the record of iteration `after`, whose digest is `follows`, and began an attempt."""

    after: int = Field(ge=0)
    attempt: Attempt
    passed: list[str] = []
    follows: str | None = None


class Divergence(Note):
    """An iteration went wrong; its record, if it came to one, names the evidence."""

    iteration: int
    passed: list[str]
    checkpoint: str | None = None
    record: dict[str, Any] | None = None


class NotedRerun(Note):
    """An iteration is done again from stage `start`, in place of `record`, after the record of digest `follows`.

    Noted before records are taken out, and a second time as `ended` once it is done, or given up. `flow_run` asked for
    it, in the attempt of number `attempt`.
    """

    iteration: int = Field(ge=1)
    start: str
    follows: str
    attempt: int
    record: dict[str, Any] | None
    flow_run: str | None = None
    ended: bool = False


class Changes(Note):
    """What had changed of the run's spec when its records after iteration `after` were taken out (-1: all of them).

    Noted where no record that is left tells it; the next one does.
    """

    after: int = Field(ge=-1)
    changed: dict[str, Any]


N = TypeVar("N", Rollback, Divergence, NotedRerun, Changes)


def rollbacks_of(records: RunRecords, contents: RunListing | None = None) -> dict[str, Rollback]:
    """The rollbacks of a run (as it has them now, or as listed), by the names of their notes."""
    return _read(records, ROLLBACKS, Rollback, contents)


def divergences_of(records: RunRecords, contents: RunListing | None = None) -> dict[str, Divergence]:
    """What diverged in the same way."""
    return _read(records, DIVERGENCES, Divergence, contents)


def reruns_of(records: RunRecords) -> list[NotedRerun]:
    """The reruns of a run, in order."""
    return list(_read(records, RERUNS, NotedRerun, None).values())


def note_rerun(records: RunRecords, iteration: int, start: str, flow_run: str | None) -> NotedRerun:
    """Note that an iteration is about to be done again: whoever has the run next finishes it."""
    note = NotedRerun(
        run=records.run,
        iteration=iteration,
        start=start,
        follows=sha256_of(records.read(iteration - 1)),
        attempt=attempt_at(rollbacks_of(records).values(), iteration).number,
        record=records.read(iteration),
        flow_run=flow_run,
    )
    records.note(RERUNS, note.model_dump(mode="json"))
    return note


def end_rerun(records: RunRecords, note: NotedRerun) -> None:
    """Note that nothing of it is left to do."""
    records.note(RERUNS, note.model_copy(update={"record": None, "ended": True}).model_dump(mode="json"))


def noted_changes(records: RunRecords, last: int) -> Mapping[str, Any] | None:
    """What had changed when the records after the last one (-1: there is none) were taken out, where that is noted."""
    noted = list(_read(records, CHANGES, Changes, None).values())
    return noted[-1].changed if noted and noted[-1].after == last else None


def note_changes(records: RunRecords, after: int, changed: Mapping[str, Any]) -> None:
    """See `Changes`."""
    records.note(CHANGES, Changes(run=records.run, after=after, changed=dict(changed)).model_dump(mode="json"))


def pending_rerun(records: RunRecords) -> NotedRerun | None:
    """The last rerun, where it has not ended, and the records are those that it left to be finished."""
    noted = reruns_of(records)
    return noted[-1] if noted and not noted[-1].ended and not _overtaken(records, noted[-1]) else None


def _overtaken(records: RunRecords, note: NotedRerun) -> bool:
    """Whether its record is written, or the run went back behind it: rolled back, damaged, or repaired."""
    there, before = records.iterations(), note.iteration - 1
    if note.iteration in there:
        return note.record is None or sha256_of(records.read(note.iteration)) != sha256_of(note.record)
    if before not in there or sha256_of(records.read(before)) != note.follows:
        return True
    return attempt_at(rollbacks_of(records).values(), note.iteration).number != note.attempt


def _read(records: RunRecords, kind: str, model: type[N], contents: RunListing | None) -> dict[str, N]:
    marks = (contents or records.contents()).notes.get(kind, ())
    names = [mark.partition(":")[0] for mark in marks]
    documents = zip(names, records.marked(marks), strict=True)
    return {name: _parsed(records.run, name, model, document) for name, document in documents if document is not None}


def _parsed(run: str, name: str, model: type[N], document: dict[str, Any]) -> N:
    try:
        note = model.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        complaint = f"is none that this version can read ({where}: {problem['msg']}): {NEWER}"
        if all(one["type"] == "extra_forbidden" for one in error.errors()):
            raise RecordOfNewerVersion(f"note {name} of run {run} {complaint}") from None
        raise _wrong(run, name, f"{complaint}; if none did") from None
    if note.run not in (None, run):
        raise _wrong(run, name, f"is one of run {note.run}")
    return note


def _wrong(run: str, name: str, complaint: str) -> RecordCorrupted:
    return RecordCorrupted(f"note {name} of run {run} {complaint}: {remedy_for(run, name.partition('/')[0])}")


def attempt_at(rollbacks: Iterable[Rollback], iteration: int) -> Attempt:
    """How often the run was rolled back to before an iteration, and what that left of its learning rates.

    An iteration that no rollback gave up stays as it was, also when it is done again later.
    """
    return last_attempt(one for one in rollbacks if one.after < iteration)


def last_attempt(rollbacks: Iterable[Rollback]) -> Attempt:
    """The attempt that the last of them began: their numbers tell, for a lost note is written again as the last one."""
    return max((one.attempt for one in rollbacks), key=lambda attempt: attempt.number, default=Attempt())


def unfinished(rollbacks: Iterable[Rollback], last: IterationRecord) -> Rollback | None:
    """The rollback of which the records that it gives up are there yet: whoever noted it died."""
    latest = max(rollbacks, key=lambda one: one.attempt.number, default=None)
    if latest is None or last.iteration <= latest.after or last.attempt >= latest.attempt.number:
        return None
    return latest


def rollbacks_in(links: Sequence[ChainedRecord]) -> list[Rollback]:
    """The rollbacks before these records.

    They follow from the records alone: what a run has noted since, being about to go back, is none of them.
    """
    return [
        Rollback(
            run=after.record.run,
            after=before.record.iteration,
            attempt=after.record.attempt_settings,
            follows=before.digest,
        )
        for before, after in pairwise(links)
        if after.record.attempt_settings != before.record.attempt_settings
    ]


def last_follows(
    records: Sequence[IterationRecord], rollbacks: Collection[Rollback], divergences: Iterable[Divergence]
) -> bool:
    """Whether the last record can have its attempt: by the rollbacks, or by one of which the note is lost.

    No later record names the last one, so what it says needs a reason: the record before it has the same, or something
    has diverged that the run went back from.
    """
    *earlier, record = records
    before = earlier[-1].attempt_settings if earlier else Attempt()
    pending = unfinished(rollbacks, record)
    noted = [attempt_at((one for one in rollbacks if one is not other), record.iteration) for other in (None, pending)]
    if record.attempt_settings in (*noted, before):
        return True
    evidence = record.forked_from is not None or any(one.iteration >= record.iteration for one in divergences)
    return evidence and record.attempt > before.number


def lost_rollbacks(
    run: str,
    links: Sequence[ChainedRecord],
    noted: dict[str, Rollback],
    divergences: Collection[Divergence],
) -> list[Rollback]:
    """The rollbacks that the records tell of, and no note does: they can be noted again.

    Raises RecordCorrupted for a note that contradicts the records (the last one aside), and for an unfinished rollback
    to a record that the run does not have.
    """
    records = [one.record for one in links]
    if any(before.attempt > record.attempt for before, record in pairwise(records)):
        return []  # earlier versions left the notes of a fork to its source
    if records and not last_follows(records, noted.values(), divergences):
        records, links = records[:-1], links[:-1]  # it is what is wrong
    if not records:
        return []
    pending = unfinished(noted.values(), records[-1])
    if pending is not None and not _goes_back(pending, links, divergences):
        name = next(name for name, one in noted.items() if one is pending)
        complaint = (
            f"goes back to another record of iteration {pending.after} than it has, so no later one is taken out"
        )
        raise _wrong(run, name, complaint)
    known = [one for one in noted.values() if one is not pending]
    lost = [one for one in rollbacks_in(links) if (one.after, one.attempt) not in ((k.after, k.attempt) for k in known)]
    for record in records:
        if attempt_at([*known, *lost], record.iteration) != record.attempt_settings:
            later = (
                name
                for name, one in noted.items()
                if one is not pending and one.after < record.iteration and one.attempt.number >= record.attempt
            )
            wrong = next(later, f"{ROLLBACKS}/of attempt {record.attempt}")
            complaint = f"says otherwise than the record of iteration {record.iteration}, of attempt {record.attempt}"
            raise _wrong(run, wrong, complaint)
    return lost


def _goes_back(pending: Rollback, links: Sequence[ChainedRecord], divergences: Iterable[Divergence]) -> bool:
    """Whether that record is the one that the rollback was noted for; of an earlier version's, what diverged tells."""
    if pending.follows is None:
        return any(one.iteration > pending.after for one in divergences)
    return pending.follows == links[pending.after].digest
