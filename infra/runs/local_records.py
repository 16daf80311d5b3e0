"""The records of a run, in `<root>/runs/<run>/`: its spec, one file for each committed iteration, and notes.

`last.json` names the last committed record, so that it is noticed when that is lost. It is written after the record,
and goes back before later records are taken out: it never names one that was not committed, and may be one behind.

Whatever the holder of the run's lease changes goes through the folder of the lease, so that it can change nothing once
another process has taken the run over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from infra.artifacts.manifest import sha256_of
from infra.runs.checksummed_json import (
    RecordError,
    RecordExists,
    RecordMissing,
    encode,
    read_checksummed,
    remedy_for_name,
)
from infra.runs.listing import RunListing
from infra.runs.local_lease import LocalLease
from infra.runs.names import NOTES, note_kind, validate_run_name
from infra.storage.filesystem import FileSystem, LocalFiles, local_root, make_folders, writing_to

SPEC = "spec.json"
LAST = "last.json"
_NUMBERED_FILE = re.compile(r"(\d{6}|[1-9]\d{6,})\.json")


class LocalRecords:
    """The records of one run as files; see `infra.runs.records.RunRecords`."""

    def __init__(
        self, root: str | Path, run: str, *, files: FileSystem | None = None, lease: LocalLease | None = None
    ) -> None:
        self.run = validate_run_name(run)
        self._files: FileSystem = LocalFiles() if files is None else files
        self._root = local_root(root)
        self.folder = self._root / "runs" / run
        if lease is not None and lease.folder.parent.parent != self.folder:
            raise ValueError(f"the lease {lease.folder} is not one of the run {self.folder}: acquire that run's")
        self._lease = lease
        self._made: set[Path] = set()

    def create_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the run's spec; RecordExists if it has one."""
        self._create(SPEC, spec)

    def restore_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the spec of a run that has lost it, or has a damaged one; see `infra.runs.records.RunRecords`."""
        lease, target, content = self._writing_lease(), self.folder / SPEC, encode(SPEC, spec)
        with writing_to(self._root), lease.fenced():
            lease.check()
            if self._files.status(target) is not None:
                self._files.rename(target, self._superseded(lease, target.stem))
                self._files.sync_folder(lease.superseded)
                self._files.sync_folder(target.parent)
            self._write_once(lease, target, content)

    def read_spec(self) -> dict[str, Any] | None:
        """The run's spec, or None for a run that was never started."""
        return self._read(SPEC)

    def commit(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Create the record of an iteration, durable when this returns; RecordExists if there is one."""
        self._create(iteration_name(iteration), record)
        self._name_last(iteration, record)

    def read(self, iteration: int) -> dict[str, Any]:
        """The record of an iteration: RecordMissing, RecordCorrupted or RecordFormatTooNew if it cannot be had."""
        record = self._read(iteration_name(iteration))
        if record is None:
            raise RecordMissing(f"run {self.run} has no record of iteration {iteration} in {self.folder}")
        return record

    def iterations(self) -> list[int]:
        """The committed iterations in order."""
        return self._numbers("iterations")

    def last(self) -> int | None:
        """The last committed iteration, or None."""
        iterations = self.iterations()
        return iterations[-1] if iterations else None

    def all(self) -> list[dict[str, Any]]:
        """Every record, in the order of the iterations; not those that are superseded while this reads."""
        records = (self._read(iteration_name(iteration)) for iteration in self.iterations())
        return [record for record in records if record is not None]

    def supersede(self, after: int) -> list[int]:
        """Take the records of all later iterations out of the run, the last one first; return their numbers.

        They lie in the lease's folder from then on. After an OSError the later ones of them may be out: call it again.
        """
        lease = self._writing_lease()
        folder = self.folder / "iterations"
        taken = []
        with writing_to(self._root), lease.fenced():
            lease.check()
            self._name_earlier(lease, after)
            for iteration in reversed(self.iterations()):
                if iteration <= after:
                    break
                self._files.rename(folder / f"{iteration:06d}.json", self._superseded(lease, f"{iteration:06d}"))
                self._files.sync_folder(lease.superseded)
                self._files.sync_folder(folder)
                taken.append(iteration)
            if not taken and self._files.status(folder) is not None:
                # Whoever took the last one out may have died before that was durable.
                self._files.sync_folder(folder)
        return taken

    def note(self, kind: str, document: Mapping[str, Any]) -> int:
        """Create the next note of a kind, durable when this returns; its number."""
        number = (self._numbers(note_kind(kind)) or [0])[-1] + 1
        while True:
            try:
                self._create(note_name(kind, number), document)
            except RecordExists:
                number += 1
            else:
                return number

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Every note of a kind, in order."""
        notes = (self._read(note_name(kind, number)) for number in self._numbers(note_kind(kind)))
        return [note for note in notes if note is not None]

    def last_note_place(self, kind: str) -> str:
        """Where people find the last note of a kind, of which there is one."""
        return str(self.folder / note_name(kind, self._numbers(kind)[-1]))

    def contents(self) -> RunListing:
        """What the run has now."""
        # Read first: a commit meanwhile names none that is not listed.
        last = self._mark(LAST) if self._files.status(self.folder / LAST) is not None else None
        return RunListing(
            {number: self._mark(iteration_name(number)) for number in self._numbers("iterations")},
            {kind: tuple(self._mark(note_name(kind, number)) for number in self._numbers(kind)) for kind in NOTES},
            last,
            naming_last=True,
        )

    def marked(self, marks: Iterable[str]) -> list[dict[str, Any] | None]:
        """What marks of `contents` stand for; None for one that was superseded since."""
        return [self._read(mark.partition(":")[0]) for mark in marks]

    def _mark(self, name: str) -> str:
        # A record that was taken out of the run and done again bears the same name.
        status = self._files.status(self.folder / name)
        return f"{name}:{uuid4().hex}" if status is None else f"{name}:{status.inode}:{status.modified_ns}"

    def _create(self, name: str, document: Mapping[str, Any]) -> None:
        lease = self._writing_lease()
        content = encode(name, document)
        with writing_to(self._root), lease.fenced():
            self._write_once(lease, self.folder / name, content)

    def _name_last(self, iteration: int, record: Mapping[str, Any]) -> None:
        lease = self._writing_lease()
        content = encode(LAST, last_document(iteration, record))
        with writing_to(self._root), lease.fenced():
            written = lease.partial / f"last-{uuid4().hex}.json"
            write_durable(self._files, written, content)
            self._files.rename(written, self.folder / LAST)
            self._files.sync_folder(self.folder)

    def _name_earlier(self, lease: LocalLease, iteration: int) -> None:
        lost = self._files.status(self.folder / LAST) is None
        try:
            record = self._read(iteration_name(iteration)) if iteration >= 0 else None
        except RecordError:
            record = None
        if record is not None:
            self._name_last(iteration, record)
            return
        if lost:
            return
        removed = lease.partial / f"last-{uuid4().hex}.json"
        self._files.rename(self.folder / LAST, removed)
        self._files.sync_folder(self.folder)
        self._files.remove(removed)

    def _write_once(self, lease: LocalLease, target: Path, content: bytes) -> None:
        self._make(target.parent)
        if self._files.status(target) is not None:
            raise self._exists(lease, target)
        written = lease.partial / f"{target.stem}-{uuid4().hex}.json"
        write_durable(self._files, written, content)
        try:
            # Unlike a rename, a link never replaces what another thread has created in the meantime.
            self._files.link(written, target)
        except FileExistsError:
            self._files.remove(written)
            raise self._exists(lease, target) from None
        self._files.sync_folder(target.parent)
        self._files.remove(written)

    def _exists(self, lease: LocalLease, target: Path) -> RecordExists:
        # The successor of a lost lease may have created it: that one must not be taken for our own.
        lease.check()
        # Whoever created it may have died before its name was durable.
        self._files.sync_folder(target.parent)
        return RecordExists(f"run {self.run}: {target} exists and is written once: read it, or choose another run name")

    def _superseded(self, lease: LocalLease, name: str) -> Path:
        count = 1
        place = lease.superseded / f"{name}.json"
        while self._files.status(place) is not None:
            count += 1
            place = lease.superseded / f"{name}-{count}.json"
        return place

    def _writing_lease(self) -> LocalLease:
        if self._lease is None:
            raise ValueError(f"run {self.run} is open for reading only: pass the lease of acquire_lease to write to it")
        return self._lease

    def _numbers(self, kind: str) -> list[int]:
        return numbers(self._files, self.folder / kind)

    def _read(self, name: str) -> dict[str, Any] | None:
        return read_checksummed(self._files, self.folder / name, name, remedy=remedy_for_name(self.run, name))

    def _make(self, folder: Path) -> None:
        if folder not in self._made:
            make_folders(self._files, folder, top=self._root)
            self._made.add(folder)


def numbers(files: FileSystem, folder: Path) -> list[int]:
    """The numbers of the documents in a folder, in order."""
    if files.status(folder) is None:
        return []
    found = [_NUMBERED_FILE.fullmatch(name) for name in files.names(folder)]
    return sorted(int(match[1]) for match in found if match is not None)


def write_durable(files: FileSystem, path: Path, content: bytes) -> None:
    """Write a file, durable but for its name."""
    files.write(path, [content])
    files.protect(path)
    files.sync_file(path)


def last_document(iteration: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """What names a record as the last one."""
    return {"iteration": iteration, "digest": sha256_of(dict(record))}


def iteration_name(iteration: int) -> str:
    """The name of an iteration's record in the folder of its run."""
    if iteration < 0:
        raise ValueError(f"iteration {iteration} cannot have a record: iterations count from 0")
    return f"iterations/{iteration:06d}.json"


def note_name(kind: str, number: int) -> str:
    """The name of a note there; notes of a kind count from 1."""
    return f"{note_kind(kind)}/{number:06d}.json"
