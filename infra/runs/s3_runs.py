"""The runs of a store on S3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.artifacts.manifest import is_kind
from infra.runs.checksummed_json import RecordError, RecordExists
from infra.runs.lease import Lease
from infra.runs.names import DOWNLOADS, is_run_name, no_run_name, no_runs, note_kind, validate_run_name
from infra.runs.s3_lease import S3Lease
from infra.runs.s3_pointer import RUNS, RunHead, RunPointer
from infra.runs.s3_records import Documents, S3Records, iteration_kind
from infra.storage.client import open_objects
from infra.storage.objects import Objects, S3Address
from infra.storage.parallel import THREADS, parallel_map


def open_s3_runs(root: str) -> S3Runs:
    """The runs of the store at an s3:// address."""
    address = S3Address.parse(root)
    return S3Runs(address, open_objects(address.bucket), threads=THREADS)


def records_of(root: str, run: str, lease: Lease) -> S3Records:
    """The records of a run in the store at `root`, by the connection of its lease."""
    if not isinstance(lease, S3Lease):
        raise ValueError(f"lease {lease.number} of run {lease.run} is not of the store {root}: acquire one there")
    return S3Runs(S3Address.parse(root), lease.head.objects, threads=THREADS).records(run, lease=lease)


class S3Runs:
    """The runs of one store on S3; see `infra.runs.records.Runs`. With `threads`, so many calls are made at a time."""

    def __init__(self, address: S3Address, objects: Objects, *, threads: int = 1) -> None:
        self._address = address
        self._objects = objects
        self._threads = threads

    def names(self, *, started: bool = True) -> list[str]:
        """The names of the runs, sorted."""
        found = [name for name in self._objects.folders(self._address.key(RUNS) + "/") if is_run_name(name)]
        if not started:
            return sorted(found)
        begun = parallel_map(self._is_started, found, threads=self._threads)
        return sorted(name for name, is_started in zip(found, begun, strict=True) if is_started)

    def unreadable(self) -> dict[str, str]:
        """See `infra.runs.records.Runs`."""
        top, runs = self._address.key("a").removesuffix("a"), self._address.key(RUNS) + "/"
        if next(iter(self._objects.entries(runs)), None) is None:
            kinds = [kind for kind in self._objects.folders(top) if is_kind(kind) and kind != DOWNLOADS]
            has_artifacts = any(self._objects.folders(f"{top}{kind}/") for kind in kinds)
            return {"any run": no_runs(self._address.uri_of(runs), "put any object there")} if has_artifacts else {}
        strange = [name for name in self._objects.folders(runs) if not is_run_name(name)]
        return {f"run {name}": no_run_name(self._address.uri_of(runs + name)) for name in strange}

    def records(self, run: str, *, lease: Lease | None = None) -> S3Records:
        """The records of a run."""
        if lease is not None and not isinstance(lease, S3Lease):
            raise ValueError(f"lease {lease.number} of run {lease.run} is not of {self._address.uri}: acquire one")
        return S3Records(self._head(validate_run_name(run)), lease=lease, threads=self._threads)

    def create(
        self,
        run: str,
        spec: Mapping[str, Any],
        records: Mapping[int, Mapping[str, Any]],
        notes: Mapping[str, Sequence[Mapping[str, Any]]] = {},
    ) -> None:
        """Create a whole run; see `infra.runs.records.Runs`."""
        head = self._head(validate_run_name(run))
        documents = Documents(head, threads=self._threads)
        names = {iteration: documents.name(iteration_kind(iteration), 0) for iteration in records}
        noted = {
            kind: tuple(documents.name(f"{note_kind(kind)}/note", 0) for _ in of_kind)
            for kind, of_kind in notes.items()
        }
        first = RunPointer(spec=documents.name("spec/spec", 0), iterations=names, notes=noted)
        version = head.read()
        if version.etag is None:
            contents = {names[iteration]: record for iteration, record in records.items()}
            for kind, of_kind in notes.items():
                contents |= dict(zip(noted[kind], of_kind, strict=True))
            documents.write({str(first.spec): spec, **contents})
            # Where only the answer was lost, somebody may have the new run already.
            if head.put(first, version) is not None or head.read().head.spec == first.spec:
                return
        raise RecordExists(f"run {run} exists in {self._address.uri}: choose another name")

    def _is_started(self, run: str) -> bool:
        try:
            head = self._head(run).read().head
        except RecordError:
            return True  # opening it raises what is wrong with it
        return head.spec is not None or bool(head.iterations)

    def _head(self, run: str) -> RunHead:
        return RunHead(self._objects, self._address, run)
