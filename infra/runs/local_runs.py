"""The runs of a local store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from infra.artifacts.manifest import is_kind
from infra.process_identity import this_process
from infra.runs.checksummed_json import RecordExists, encode
from infra.runs.lease import Lease
from infra.runs.local_lease import LocalLease
from infra.runs.local_lease_folders import TAKEN_ERRORS
from infra.runs.local_records import (
    LAST,
    SPEC,
    LocalRecords,
    iteration_name,
    last_document,
    note_name,
    numbers,
    write_durable,
)
from infra.runs.names import DOWNLOADS, is_run_name, no_run_name, no_runs, validate_run_name
from infra.storage.filesystem import FileSystem, LocalFiles, folders, local_root, make_folders, remove_tree, writing_to

STAGED = ".new-"


class LocalRuns:
    """The runs of one store in a folder; see `infra.runs.records.Runs`."""

    def __init__(self, root: str | Path, *, files: FileSystem | None = None) -> None:
        self._root = local_root(root)
        self._runs = self._root / "runs"
        self._files: FileSystem = LocalFiles() if files is None else files

    def names(self, *, started: bool = True) -> list[str]:
        """The names of the runs, sorted; without `started` also of those with neither spec nor records yet."""
        if self._files.status(self._runs) is None:
            return []
        names = [name for name in self._files.names(self._runs) if is_run_name(name)]
        return [name for name in names if not started or self._is_started(self._runs / name)]

    def unreadable(self) -> dict[str, str]:
        """See `infra.runs.records.Runs`."""
        if self._files.status(self._runs) is None:
            kinds = [kind for kind in folders(self._files, self._root) if is_kind(kind.name) and kind.name != DOWNLOADS]
            has_artifacts = any(folders(self._files, kind) for kind in kinds)
            return {"any run": no_runs(str(self._runs), "make an empty folder there")} if has_artifacts else {}
        found = {name: self._complaint(self._runs / name) for name in self._files.names(self._runs)}
        return {f"run {name}": complaint for name, complaint in found.items() if complaint is not None}

    def records(self, run: str, *, lease: Lease | None = None) -> LocalRecords:
        """The records of a run."""
        if lease is not None and not isinstance(lease, LocalLease):
            raise ValueError(f"lease {lease.number} of run {lease.run} is not of the store {self._root}: acquire one")
        return LocalRecords(self._root, run, files=self._files, lease=lease)

    def create(
        self,
        run: str,
        spec: Mapping[str, Any],
        records: Mapping[int, Mapping[str, Any]],
        notes: Mapping[str, Sequence[Mapping[str, Any]]] = {},
    ) -> None:
        """Create a whole run; see `infra.runs.records.Runs`."""
        target = self._runs / validate_run_name(run)
        documents = {SPEC: spec, **{iteration_name(iteration): record for iteration, record in records.items()}}
        if records:
            documents[LAST] = last_document(max(records), records[max(records)])
        for kind, noted in notes.items():
            documents |= {note_name(kind, number): note for number, note in enumerate(noted, 1)}
        contents = {name: encode(name, document) for name, document in documents.items()}
        staged = self._runs / f"{STAGED}{this_process().token}-{uuid4().hex}"
        with writing_to(self._root):
            make_folders(self._files, self._runs, top=self._root)
            try:
                self._write(staged, contents)
                self._files.rename(staged, target)
                self._files.sync_folder(self._runs)
            except OSError as error:
                with suppress(OSError):
                    if self._files.status(staged) is not None:
                        remove_tree(self._files, staged)
                if error.errno in TAKEN_ERRORS:
                    # Whoever created it may have died before its name was durable.
                    self._files.sync_folder(self._runs)
                    raise RecordExists(f"run {run} exists in {self._runs}: choose another name") from None
                raise

    def _write(self, staged: Path, contents: Mapping[str, bytes]) -> None:
        self._files.make_folder(staged)
        inner = sorted({staged / "iterations", *((staged / name).parent for name in contents)} - {staged})
        for folder in inner:
            self._files.make_folder(folder)
        for name, content in contents.items():
            write_durable(self._files, staged / name, content)
        for folder in (*inner, staged):
            self._files.sync_folder(folder)

    def _complaint(self, place: Path) -> str | None:
        status = self._files.status(place)
        if status is None or status.kind not in ("folder", "link") or place.name.startswith(STAGED):
            return None
        try:
            looks_like_a_run = not {SPEC, "iterations", "leases"}.isdisjoint(self._files.names(place))
            if looks_like_a_run and not is_run_name(place.name):
                return no_run_name(str(place))
        except OSError as error:
            return f"{place} cannot be read ({error.strerror}): make it readable, or move it out of {self._runs}"
        return None

    def _is_started(self, run: Path) -> bool:
        try:
            return self._files.status(run / SPEC) is not None or bool(numbers(self._files, run / "iterations"))
        except OSError:
            return True  # opening it raises what is wrong with it
