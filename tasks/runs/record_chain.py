"""The chain of a run's records: whether they are what this run has written, all of them and in this order.

    spec.json ◄── record 0, which has a copy of it ◄── record 1 ◄── record 2 ◄── …

Each record names its run, its iteration, the digest of the spec that it was made with, and the digest of the record
before it, and `last.json` (on S3 the run's head) names the last one. So a record that is missing, that comes from
another run or another place, or that was written over is noticed before anything is built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.artifacts.manifest import sha256_of
from infra.runs.listing import RunListing
from infra.runs.records import RecordCorrupted, RecordError, RecordMissing, RunRecords, remedy_for
from ppo_core.records import content_digest
from ppo_core.spec import CheckpointSpec, RunSpec
from tasks.runs.iteration_record import NEWER, ChainedRecord, IterationRecord, RecordOfNewerVersion, read_record
from tasks.runs.notes import Rollback, divergences_of, last_follows, lost_rollbacks, rollbacks_of

T = TypeVar("T")
LOOKS = 3
"""A reader that comes amid a rollback sees old and new records: so often it looks until nothing changes meanwhile."""
NO_PART_OF_A_RUN = "folder"
MAY_CHANGE = ("iterations: ", "checkpoint.", "engines.", "guards.", "promotion.", "registry.", "training.")
"""What a run may go on with another value of: its length, how engines run, what is kept, where its policy goes."""
FOUND = ("hub_commits: ",)
"""What is no setting, and found out when a name of the hub is new."""


@dataclass(frozen=True)
class Chain:
    """The records of a run, checked, and the spec that it began with; without records perhaps None.

    `lost_rollbacks` no note tells any more, as far as the notes were read too. `lost_last`: the last records
    that were committed are gone.
    """

    run: str
    links: tuple[ChainedRecord, ...]
    spec: Mapping[str, Any] | None
    spec_is_lost: bool = False
    lost_rollbacks: tuple[Rollback, ...] = ()
    lost_last: LastRecordLost | None = None

    @property
    def records(self) -> list[IterationRecord]:
        """In the order of the iterations, which begin with 0."""
        return [link.record for link in self.links]


class LastCommitted(BaseModel):
    """The last record that was committed, by what the store notes besides the records."""

    model_config = ConfigDict(frozen=True)

    iteration: int = Field(ge=0)
    digest: str


class LastRecordLost(RecordMissing):
    """The last records that were committed are gone, from iteration `first` on."""

    def __init__(self, run: str, first: int, last: int) -> None:
        which = f"the record of iteration {last}" if first == last else f"the records of iterations {first} to {last}"
        self.first = first
        self.complaint = f"{which} of run {run} had been written, and cannot be found"
        super().__init__(
            f"{self.complaint}: put back what is missing from a copy, or let `ppoflow resume {run}` make it again, "
            "from the stages that are still in the store"
        )


class LastRecordReplaced(RecordCorrupted):
    """The last record is not the one that was committed as such."""

    def __init__(self, run: str, last: LastCommitted, found: str) -> None:
        self.first = last.iteration
        super().__init__(
            f"the record of iteration {last.iteration} of run {run} (digest {_shown(found)}) is not the one that was "
            f"committed (digest {_shown(last.digest)}): {remedy_for(run, last.iteration)}"
        )


def record_digest(document: Mapping[str, Any]) -> str:
    """The digest by which the next record names this one, or by which a spec is compared."""
    return sha256_of(dict(document))


def made_with(spec: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    """The digest of the spec that an iteration was made with: the run's own, and what had changed since."""
    document = with_values(spec, changed)
    document.pop(NO_PART_OF_A_RUN, None)
    return content_digest(document)


def with_values(document: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A nested document with these values by dotted names."""
    result = deepcopy(dict(document))
    for name, value in changed.items():
        *sections, key = name.split(".")
        target = result
        for section in sections:
            if not isinstance(target.get(section), dict):
                target[section] = {}
            target = target[section]
        target[key] = value
    return result


def link(run: str, document: Mapping[str, Any], *, remedy: str | None = None) -> ChainedRecord:
    """The record that a document holds. Raises RecordOfNewerVersion where it holds none."""
    try:
        return ChainedRecord(read_record(dict(document)), record_digest(document))
    except ValidationError as error:
        problem, iteration = error.errors()[0], document.get("iteration", "?")
        where = ".".join(str(part) for part in problem["loc"])
        raise RecordOfNewerVersion(
            f"the record of iteration {iteration} of run {run} is none that this version can read ({where}: "
            f"{problem['msg']}): {remedy or NEWER}"
        ) from error


def check_chain(run: str, numbers: Sequence[int], links: Sequence[ChainedRecord]) -> None:
    """Raise RecordMissing for a gap, and RecordCorrupted for a record that is not this run's or not in its place."""
    broken = first_break(run, numbers, links)
    if broken is not None:
        raise broken[1]


def first_break(
    run: str, numbers: Sequence[int], links: Sequence[ChainedRecord]
) -> tuple[int, RecordMissing | RecordCorrupted] | None:
    """The iteration from which on the records cannot be believed, and why; None where all can."""
    for expected, number in enumerate(numbers):
        if number != expected:
            return expected, RecordMissing(
                f"run {run} has a record of iteration {number} and none of iteration {expected}: "
                f"{remedy_for(run, expected)}"
            )
    for number in range(len(links)):
        broken = _broken(run, number, links)
        if broken is not None:
            suspect, complaint = broken
            message = f"the record of iteration {number} of run {run} {complaint}: {remedy_for(run, suspect)}"
            return suspect, RecordCorrupted(message)
    return None


def _broken(run: str, number: int, links: Sequence[ChainedRecord]) -> tuple[int, str] | None:
    """Which record cannot be believed, and what is wrong with the one of iteration `number`."""
    record, spec = links[number].record, links[0].record.spec
    if record.run != run:
        return number, f"is one of run {record.run}"
    if record.iteration != number:
        return number, f"is one of iteration {record.iteration}"
    if spec is None or (record.previous is None) != (number == 0):
        return number, "names neither spec nor predecessor"
    if number and record.previous != links[number - 1].digest:
        # One of the two was written over, and nothing tells which.
        return number - 1, (
            f"follows another record (digest {_shown(record.previous)}) than that of iteration {number - 1} "
            f"({_shown(links[number - 1].digest)})"
        )
    before = links[number - 1].record if number else record
    if record.attempt < before.attempt and before.forked_from is None:  # earlier versions left those to the source
        return number, f"is of attempt {record.attempt}, and the one before it of attempt {before.attempt}"
    expected = made_with(spec, record.changed)
    if record.spec_digest != expected:
        return number, f"was made with another spec (digest {record.spec_digest[:12]}, the run's is {expected[:12]})"
    if number == len(links) - 1 and (complaint := _impossible(record, before, spec)):
        return number, complaint
    return None


def _impossible(record: IterationRecord, before: IterationRecord, started_with: Mapping[str, Any]) -> str | None:
    """What cannot be in a run's last record, which no later one names; `before` is the one before it."""
    other = sorted(key for key in record.changed if not f"{key}: ".startswith((*MAY_CHANGE, *FOUND)))
    if other and record.forked_from is None:
        return f"was made with another {', '.join(other)}, with which no run goes on"
    try:
        spec = RunSpec.model_validate(started_with)
    except ValidationError:
        return None  # of another version: what it asked for is not known here
    try:
        spec = RunSpec.model_validate(with_values(spec.model_dump(mode="json"), record.changed))
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "value_error":
            return None  # by a rule that may be younger than the record
        where = ".".join(str(part) for part in problem["loc"])
        return f"was made with a spec that is none ({where}: {problem['msg']})"
    # Without any, all is kept; and another version may make another one of the same spec.
    if record.retention not in (spec.retention, CheckpointSpec(), before.retention if before is not record else None):
        return f"keeps checkpoints by {record.retention!r}, and its spec says {spec.retention!r}"
    return None


def _shown(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def read_chain(records: RunRecords, *, notes: bool = False) -> Chain:
    """The records of a run, all of them checked, with `notes` also against these; also while another process writes.

    Raises RecordMissing or RecordCorrupted with the remedy where one is missing, damaged, or not this run's.
    """

    def read(contents: RunListing, lost: LastRecordLost | None = None) -> Chain:
        chain = _read(records, contents.iterations)
        if lost is None:
            check_last(records, contents, chain.links)
        rollbacks = _lost(records, chain.links, contents) if notes else ()
        return replace(chain, lost_rollbacks=rollbacks, lost_last=lost)

    try:
        return unless_changed(records, read)
    except LastRecordLost as error:
        lost = error
        return unless_changed(records, lambda contents: read(contents, lost))


def check_last(records: RunRecords, contents: RunListing, links: Sequence[ChainedRecord]) -> None:
    """Raise LastRecordLost or LastRecordReplaced where the record that was committed last is gone, or is another."""
    (document,) = [None] if contents.last is None else records.marked([contents.last])
    if document is None:
        return
    last = LastCommitted.model_validate(document)
    if last.iteration >= len(links):
        raise LastRecordLost(records.run, len(links), last.iteration)
    if links[last.iteration].digest != last.digest:
        raise LastRecordReplaced(records.run, last, links[last.iteration].digest)


def _lost(records: RunRecords, links: Sequence[ChainedRecord], contents: RunListing) -> tuple[Rollback, ...]:
    noted, diverged = rollbacks_of(records, contents), divergences_of(records, contents).values()
    chain = [one.record for one in links]
    if chain and not last_follows(chain, noted.values(), diverged):
        last = chain[-1].iteration
        raise RecordCorrupted(
            f"the record of iteration {last} of run {records.run} is of attempt {chain[-1].attempt} (rates times "
            f"{chain[-1].rate_factor:g}), and no rollback led to it: {remedy_for(records.run, last)}"
        )
    return tuple(lost_rollbacks(records.run, links, noted, diverged))


def unless_changed(records: RunRecords, read: Callable[[RunListing], T]) -> T:
    """What `read` makes of a run's contents. An error counts where the run was the same before and after it."""
    for look in range(1, LOOKS + 1):
        contents = records.contents()
        try:
            return read(contents)
        except RecordError:
            if look == LOOKS or records.contents() == contents:
                raise
    raise AssertionError("unreachable")


def _read(records: RunRecords, iterations: Mapping[int, str]) -> Chain:
    documents = zip(iterations, records.marked(iterations.values()), strict=True)
    there = {number: document for number, document in documents if document is not None}
    links = [link(records.run, document) for document in there.values()]
    check_chain(records.run, list(there), links)
    stored = records.read_spec()
    if not links:
        return Chain(records.run, (), stored)
    spec = links[0].record.spec
    assert spec is not None
    if stored is not None and record_digest(stored) != record_digest(spec):
        raise RecordCorrupted(
            f"the spec of run {records.run} is not the one that its first record has: {remedy_for(records.run)}"
        )
    return Chain(records.run, tuple(links), spec, spec_is_lost=stored is None)


def spec_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """The copy of the spec in a run's first record."""
    spec = read_record(dict(document)).spec
    if spec is None:
        raise RecordMissing("the first record of this run has no copy of its spec")
    return spec


def spec_document(records: RunRecords) -> dict[str, Any] | None:
    """The spec that a run began with; where its document is lost, the copy in its first record. None for a new run."""
    document = records.read_spec()
    if document is None and records.last() is not None:
        return read_record(records.read(0)).spec
    return document
