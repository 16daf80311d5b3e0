"""The runs of a local store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.runs.lease import Lease
from infra.runs.local_lease import LocalLease
from infra.runs.local_records import LocalRecords, create_run, list_runs


class LocalRuns:
    """The runs of one store in a folder; see `infra.runs.records.Runs`."""

    def __init__(self, root: str | Path) -> None:
        self._root = root

    def names(self, *, started: bool = True) -> list[str]:
        """The names of the runs, sorted."""
        return list_runs(self._root, started=started)

    def records(self, run: str, *, lease: Lease | None = None) -> LocalRecords:
        """The records of a run."""
        if lease is not None and not isinstance(lease, LocalLease):
            raise ValueError(f"lease {lease.number} of run {lease.run} is not of the store {self._root}: acquire one")
        return LocalRecords(self._root, run, lease=lease)

    def create(self, run: str, spec: Mapping[str, Any], records: Mapping[int, Mapping[str, Any]]) -> None:
        """Create a whole run; see `infra.runs.records.create_run`."""
        create_run(self._root, run, spec, records)
