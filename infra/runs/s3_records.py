"""The records of a run on S3: checksummed documents that are written first, and that the run's head then names.

A document is never written twice, so what was read once need not be read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from infra.runs.checksummed_json import (
    CHECKSUM,
    RecordCorrupted,
    RecordExists,
    RecordMissing,
    decode,
    encode,
    remedy_for_name,
)
from infra.runs.listing import RunListing
from infra.runs.names import note_kind
from infra.runs.s3_lease import S3Lease
from infra.runs.s3_pointer import RunHead, RunPointer
from infra.storage.parallel import parallel_map
from infra.storage.rereading import read_again

ITERATIONS = "iterations/"


class Documents:
    """The documents of a run; remembers those that it has seen."""

    def __init__(self, head: RunHead, *, threads: int) -> None:
        self._head = head
        self._threads = threads
        self._seen: dict[str, bytes] = {}

    def name(self, kind: str, lease: int) -> str:
        """A name that no document has or will have."""
        return f"{kind}-{lease:06d}-{uuid4().hex[:16]}.json"

    def write(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Write documents under such names."""
        encoded = {name: encode(name, document) for name, document in documents.items()}
        parallel_map(lambda name: self._write(name, encoded[name]), encoded, threads=self._threads)

    def read(self, name: str) -> dict[str, Any]:
        """A document that the head names."""
        if name not in self._seen:
            self._fetch(name)
        document: dict[str, Any] = json.loads(self._seen[name])
        document.pop(CHECKSUM)
        return document

    def read_all(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Several documents, in their order."""
        names = list(names)
        parallel_map(self._fetch, (name for name in names if name not in self._seen), threads=self._threads)
        return [self.read(name) for name in names]

    def read_present(self, names: Iterable[str]) -> list[dict[str, Any] | None]:
        """The same; None for one that is not there any more."""
        names = list(names)
        parallel_map(self._look, (name for name in names if name not in self._seen), threads=self._threads)
        return [self.read(name) if name in self._seen else None for name in names]

    def _write(self, name: str, content: bytes) -> None:
        self._head.objects.write(self._head.key(name), content)
        self._seen[name] = content

    def _fetch(self, name: str) -> None:
        if not self._look(name):
            raise RecordCorrupted(
                f"{self._head.place(name)} is gone, and run {self._head.run} names it: {self._remedy(name)}"
            )

    def _look(self, name: str) -> bool:
        """Read a document; whether it is there."""
        place = self._head.place(name)

        def parse(content: bytes) -> bytes:
            decode(place, name, content, remedy=self._remedy(name))
            return content

        read = read_again(self._head.objects, self._head.key(name), parse, RecordCorrupted)
        if read is not None:
            self._seen[name] = read[0]
        return read is not None

    def _remedy(self, name: str) -> str:
        return f"put back an earlier version of this object, or {remedy_for_name(self._head.run, name)}"


class S3Records:
    """The records of one run on S3; see `infra.runs.records.RunRecords`.

    The holder of the lease need not look at the head each time: nobody else changes it, and who does, takes the lease.
    """

    def __init__(self, head: RunHead, *, lease: S3Lease | None = None, threads: int = 1) -> None:
        if lease is not None and lease.head.place() != head.place():
            raise ValueError(f"the lease of {lease.head.place()} is not one of the run {head.place()}: acquire that's")
        self.run = head.run
        self._head = head if lease is None else lease.head
        self._lease = lease
        self._documents = Documents(self._head, threads=threads)

    def create_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the run's spec; RecordExists if it has one."""

        def refuse(head: RunPointer) -> None:
            if head.spec is not None:
                raise self._exists(head.spec)

        self._create("spec/spec", spec, refuse, lambda head, name: head.changed(spec=name))

    def restore_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the spec of a run that has lost it, or has a damaged one; see `infra.runs.records.RunRecords`."""

        def replace(head: RunPointer, name: str) -> RunPointer:
            before = () if head.spec is None else (head.spec,)
            return head.changed(spec=name, superseded=(*head.superseded, *before))

        self._create("spec/spec", spec, lambda head: None, replace)

    def read_spec(self) -> dict[str, Any] | None:
        """The run's spec, or None for a run that was never started."""
        name = self._now().spec
        if name is None:
            return None
        try:
            return self._documents.read(name)
        except RecordCorrupted:
            if self._head.objects.read(self._head.key(name)) is None:
                return None  # lost: the first record has a copy
            raise

    def commit(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Create the record of an iteration, durable when this returns; RecordExists if there is one."""

        def refuse(head: RunPointer) -> None:
            if iteration in head.iterations:
                raise self._exists(head.iterations[iteration])

        def add(head: RunPointer, name: str) -> RunPointer:
            return head.changed(iterations={**head.iterations, iteration: name})

        self._create(iteration_kind(iteration), record, refuse, add)

    def read(self, iteration: int) -> dict[str, Any]:
        """The record of an iteration: RecordMissing, RecordCorrupted or RecordFormatTooNew if it cannot be had."""
        iteration_kind(iteration)
        name = self._now().iterations.get(iteration)
        if name is None:
            raise RecordMissing(f"run {self.run} has no record of iteration {iteration} in {self._head.place()}")
        return self._documents.read(name)

    def iterations(self) -> list[int]:
        """The committed iterations in order."""
        return sorted(self._now().iterations)

    def last(self) -> int | None:
        """The last committed iteration, or None."""
        return max(self._now().iterations, default=None)

    def all(self) -> list[dict[str, Any]]:
        """Every record, in the order of the iterations."""
        return self._documents.read_all(name for _, name in sorted(self._now().iterations.items()))

    def contents(self) -> RunListing:
        """What the run has now."""
        head = self._now()
        return RunListing(dict(sorted(head.iterations.items())), head.notes)

    def marked(self, marks: Iterable[str]) -> list[dict[str, Any] | None]:
        """What marks of `contents` stand for; None for a note that was moved away, as its remedy may be."""
        marks = list(marks)
        found = self._documents.read_present(marks)
        return [
            self._documents.read(mark) if document is None and mark.startswith(ITERATIONS) else document
            for mark, document in zip(marks, found, strict=True)
        ]

    def supersede(self, after: int) -> list[int]:
        """Take the records of all later iterations out of the run, all at once; return their numbers, the last first.

        The head names them as superseded from then on.
        """
        taken: list[int] = []

        def take_out(head: RunPointer) -> RunPointer:
            taken[:] = sorted((number for number in head.iterations if number > after), reverse=True)
            if not taken:
                return head
            kept = {number: name for number, name in head.iterations.items() if number <= after}
            out = tuple(head.iterations[number] for number in taken)
            return head.changed(iterations=kept, superseded=(*head.superseded, *out))

        lease = self._writing_lease()
        lease.change(take_out)
        if not taken:
            lease.check()
        return taken

    def note(self, kind: str, document: Mapping[str, Any]) -> int:
        """Create the next note of a kind, durable when this returns; its number."""
        note_kind(kind)

        def add(head: RunPointer, name: str) -> RunPointer:
            return head.changed(notes={**head.notes, kind: (*head.notes.get(kind, ()), name)})

        head, name = self._create(f"{kind}/note", document, lambda head: None, add)
        return head.notes[kind].index(name) + 1

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Every note of a kind, in order; not one that was moved away, as a remedy may be: the head names it still."""
        found = self._documents.read_present(self._now().notes.get(note_kind(kind), ()))
        return [note for note in found if note is not None]

    def last_note_place(self, kind: str) -> str:
        """Where people find the last note of a kind, of which there is one."""
        names = self._now().notes[note_kind(kind)]
        there = zip(names, self._documents.read_present(names), strict=True)
        return self._head.place([name for name, note in there if note is not None][-1])

    def _create(self, kind: str, document: Mapping[str, Any], refuse: Any, add: Any) -> tuple[RunPointer, str]:
        """Write a document and have the head name it, unless `refuse` raises."""
        lease = self._writing_lease()
        name = self._documents.name(kind, lease.number)

        def look(head: RunPointer) -> RunPointer:
            refuse(head)
            return head

        def step(head: RunPointer) -> RunPointer:
            if name in head.documents():  # a swap of which only the answer was lost
                return head
            refuse(head)
            after: RunPointer = add(head, name)
            return after

        lease.change(look)
        self._documents.write({name: document})
        return lease.change(step), name

    def _exists(self, name: str) -> RecordExists:
        place = self._head.place(name)
        return RecordExists(f"run {self.run}: {place} exists and is written once: read it, or choose another run name")

    def _now(self) -> RunPointer:
        known = self._lease is not None and not self._lease.lost
        return (self._head.known() if known else self._head.read()).head

    def _writing_lease(self) -> S3Lease:
        if self._lease is None:
            raise ValueError(f"run {self.run} is open for reading only: pass the lease of acquire_lease to write to it")
        return self._lease


def iteration_kind(iteration: int) -> str:
    """What the names of an iteration's documents begin with."""
    if iteration < 0:
        raise ValueError(f"iteration {iteration} cannot have a record: iterations count from 0")
    return f"{ITERATIONS}{iteration:06d}"
