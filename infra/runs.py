"""The records of a run, in `<root>/runs/<run>/`: its spec, and one file for each committed iteration.

A record is the truth of its run. It is created exactly once, whole and durable, after everything that it names;
nothing ever changes it. Each file carries a seal, the sha256 of its content and its own name; reading checks it and
takes it off.
Not-a-number and infinity are kept (as Python's JSON spells them), for a metric may be either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from infra.filesystem import FileSystem, LocalFiles, local_root, make_folders, read_whole, writing_to
from infra.manifest import sha256_of

RECORD_FORMAT = 1
SEAL = "seal"
RUN_NAME_LIMIT = 100
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ITERATION_FILE = re.compile(r"(\d{6}|[1-9]\d{6,})\.json")


class InvalidRunName(ValueError):
    """This name cannot name a run."""


class RecordError(RuntimeError):
    """Something is wrong with a run's records."""


class RecordExists(RecordError):
    """The record is there already; records are written once."""


class RecordMissing(RecordError):
    """There is no such record."""


class RecordCorrupted(RecordError):
    """A record is not what was written."""


class RecordFormatTooNew(RecordError):
    """A newer version wrote this record, and this one cannot read it."""


def validate_run_name(name: str) -> str:
    """Return a run's name, or say why it cannot be one."""
    if len(name) > RUN_NAME_LIMIT:
        raise InvalidRunName(f"run name of {len(name)} characters: use at most {RUN_NAME_LIMIT}")
    if _RUN_NAME.fullmatch(name) is None or ".." in name:
        raise InvalidRunName(
            f"run name {name!r}: use letters, digits, dots, dashes and underscores, "
            "beginning with a letter, a digit or an underscore, without two dots in a row"
        )
    return name


def list_runs(root: str | Path, *, files: FileSystem | None = None) -> list[str]:
    """The names of the runs that have records in a store, sorted."""
    seam: FileSystem = LocalFiles() if files is None else files
    folder = local_root(root) / "runs"
    if seam.status(folder) is None:
        return []
    return [name for name in seam.names(folder) if _RUN_NAME.fullmatch(name) is not None]


class RunRecords:
    """The records of one run; the folder is made by the first write."""

    def __init__(self, root: str | Path, run: str, *, files: FileSystem | None = None) -> None:
        self.run = validate_run_name(run)
        self._files: FileSystem = LocalFiles() if files is None else files
        self._root = local_root(root)
        self.folder = self._root / "runs" / run
        self._made: set[Path] = set()

    def create_spec(self, spec: Mapping[str, Any]) -> None:
        """Write the run's spec; RecordExists if it has one."""
        self._create("spec.json", spec)

    def read_spec(self) -> dict[str, Any] | None:
        """The run's spec, or None for a run that was never started."""
        return self._read("spec.json")

    def commit(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Create the record of an iteration, durable when this returns; RecordExists if there is one.

        After an OSError the record may be there or not: read it, and commit again if it is not.
        """
        self._create(_iteration_name(iteration), record)

    def read(self, iteration: int) -> dict[str, Any]:
        """The record of an iteration: RecordMissing, RecordCorrupted or RecordFormatTooNew if it cannot be had."""
        record = self._read(_iteration_name(iteration))
        if record is None:
            raise RecordMissing(f"run {self.run} has no record of iteration {iteration} in {self.folder}")
        return record

    def iterations(self) -> list[int]:
        """The committed iterations in order."""
        folder = self.folder / "iterations"
        if self._files.status(folder) is None:
            return []
        found = [_ITERATION_FILE.fullmatch(name) for name in self._files.names(folder)]
        return sorted(int(match[1]) for match in found if match is not None)

    def last(self) -> int | None:
        """The last committed iteration, or None."""
        iterations = self.iterations()
        return iterations[-1] if iterations else None

    def all(self) -> list[dict[str, Any]]:
        """Every record, in the order of the iterations."""
        return [self.read(iteration) for iteration in self.iterations()]

    def _create(self, name: str, document: Mapping[str, Any]) -> None:
        content = _sealed(name, document)
        with writing_to(self._root):
            self._write_once(self.folder / name, content)

    def _write_once(self, target: Path, content: bytes) -> None:
        self._make(target.parent)
        if self._files.status(target) is not None:
            raise self._exists(target)
        self._make(partial := self.folder / "partial")
        written = partial / f"{target.stem}-{uuid4().hex}.json"
        self._files.write(written, [content])
        self._files.protect(written)
        self._files.sync_file(written)
        try:
            # Unlike a rename, a link never replaces what another writer has created in the meantime.
            self._files.link(written, target)
        except FileExistsError:
            self._files.remove(written)
            raise self._exists(target) from None
        self._files.sync_folder(target.parent)
        self._files.remove(written)

    def _exists(self, target: Path) -> RecordExists:
        # Whoever created it may have died before its name was durable.
        self._files.sync_folder(target.parent)
        return RecordExists(f"run {self.run}: {target} exists and is written once: read it, or choose another run name")

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if self._files.status(path) is None:
            return None
        content = read_whole(self._files, path)
        try:
            document = json.loads(content)
        except ValueError as error:
            raise _corrupted(path, f"is no JSON ({error})") from error
        seal = document.pop(SEAL, None) if isinstance(document, dict) else None
        if not isinstance(seal, dict):
            raise _corrupted(path, "carries no seal")
        stated = seal.get("format")
        if isinstance(stated, int) and stated > RECORD_FORMAT:
            raise RecordFormatTooNew(
                f"{path} has record format {stated} (or is damaged), this version reads up to format {RECORD_FORMAT}: "
                f"use a ppoflow that reads record format {stated}"
            )
        if _sealed(name, document) != content:
            raise _corrupted(path, f"does not have its own sha256 {seal.get('sha256')}")
        return document

    def _make(self, folder: Path) -> None:
        if folder not in self._made:
            make_folders(self._files, folder, top=self._root)
            self._made.add(folder)


def _iteration_name(iteration: int) -> str:
    if iteration < 0:
        raise ValueError(f"iteration {iteration} cannot have a record: iterations count from 0")
    return f"iterations/{iteration:06d}.json"


def _sealed(name: str, document: Mapping[str, Any]) -> bytes:
    if SEAL in document:
        raise ValueError(f"a record cannot have a key {SEAL!r} of its own: the store adds it")
    plain = json.loads(json.dumps(dict(document)))
    seal = {"format": RECORD_FORMAT, "sha256": sha256_of({"name": name, "record": plain})}
    return (json.dumps({**plain, SEAL: seal}, indent=1) + "\n").encode()


def _corrupted(path: Path, complaint: str) -> RecordCorrupted:
    return RecordCorrupted(f"{path} {complaint}: move it away to fall back to the iteration before it")
