"""The records of a run: its spec, one record for each committed iteration, and notes.

A record is the truth of its run. It is created exactly once, complete and durable, after everything that it names;
nothing ever changes it. Only the holder of the run's lease writes, and it can change nothing once another process has
taken the run over. Where and how they are kept depends on the store: see `infra.runs.local_records` and
`infra.runs.s3_pointer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from infra.runs.checksummed_json import (
    RecordCorrupted,
    RecordError,
    RecordExists,
    RecordFormatTooNew,
    RecordMissing,
    remedy_for,
)
from infra.runs.lease import Lease
from infra.runs.listing import RunListing
from infra.runs.names import NOTES, InvalidRunName, validate_run_name

__all__ = [
    "NOTES",
    "InvalidRunName",
    "RecordCorrupted",
    "RecordError",
    "RecordExists",
    "RecordFormatTooNew",
    "RecordMissing",
    "RunRecords",
    "Runs",
    "remedy_for",
    "validate_run_name",
]


class RunRecords(Protocol):
    """The records of one run. Reading needs no lease; writing needs the run's, and fails with LeaseLost without it.

    After an error of the storage or LeaseLost, what was to be written may be there or not: read it, and write it again
    if it is not.
    """

    run: str

    def create_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the run's spec; RecordExists if it has one."""

    def restore_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the spec of a run that has lost it, or has a damaged one; what is there is kept aside.

        After an error the run may be without one: call it again.
        """

    def read_spec(self) -> dict[str, Any] | None:
        """The run's spec; None for a run that was never started, or that has lost it."""

    def commit(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Create the record of an iteration, durable when this returns; RecordExists if there is one."""

    def read(self, iteration: int) -> dict[str, Any]:
        """The record of an iteration: RecordMissing, RecordCorrupted or RecordFormatTooNew if it cannot be had."""

    def iterations(self) -> list[int]:
        """The committed iterations in order."""

    def last(self) -> int | None:
        """The last committed iteration, or None."""

    def all(self) -> list[dict[str, Any]]:
        """Every record, in the order of the iterations; not those that are superseded while this reads."""

    def contents(self) -> RunListing:
        """What the run has now."""

    def marked(self, marks: Iterable[str]) -> list[dict[str, Any] | None]:
        """The records or notes that marks of `contents` stand for; None for one that was superseded since."""

    def supersede(self, after: int) -> list[int]:
        """Take the records of all later iterations out of the run; return their numbers.

        They are kept aside. After an error some of them may be out, the last ones first: call it again.
        """

    def note(self, kind: str, document: Mapping[str, Any]) -> int:
        """Create the next note of a kind, durable when this returns; its number."""

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Every note of a kind, in order; not one that was moved away, as the remedy for a damaged one may be."""

    def last_note_place(self, kind: str) -> str:
        """Where people find the last note of a kind, of which there is one."""


class Runs(Protocol):
    """The runs of one store; opened by `infra.backend.open_runs`."""

    def names(self, *, started: bool = True) -> list[str]:
        """The names of the runs, sorted; without `started` also of those that have neither spec nor records yet."""

    def unreadable(self) -> dict[str, str]:
        """Of which runs nothing can be told although they may be there, and why; such a run may need any artifact.

        These are what lies among the runs and is none, and any run where the store has artifacts and no runs at all.
        """

    def records(self, run: str, *, lease: Lease | None = None) -> RunRecords:
        """The records of a run; without its lease they can be read only."""

    def create(
        self,
        run: str,
        spec: Mapping[str, Any],
        records: Mapping[int, Mapping[str, Any]],
        notes: Mapping[str, Sequence[Mapping[str, Any]]] = {},
    ) -> None:
        """Create a whole run, which appears at once and durable with all its records, and its notes by their kinds.

        Raises RecordExists if there is one.

        After an error of the storage it may be there or not.
        """
