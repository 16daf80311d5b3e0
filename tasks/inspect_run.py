"""Where a run stands, read from its records alone."""

from __future__ import annotations

from dataclasses import dataclass

from infra.artifacts import open_store
from infra.runs import list_runs, open_records
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.iteration_record import IterationRecord, read_record


@dataclass(frozen=True)
class RunSoFar:
    """A run's records, and how many iterations it is meant to have."""

    run: str
    records: list[IterationRecord]
    iterations: int

    def summary(self) -> str:
        """Position and best policy in a few lines."""
        last = self.records[-1]
        value = "" if last.best.value is None else f" ({last.best.value:.3f})"
        return "\n".join(
            [
                f"run {self.run}: iteration {last.iteration} of {self.iterations}, data at {last.cursor}",
                f"  best policy        iteration {last.best.iteration}{value}",
                f"  checkpoint         {last.checkpoint.uri}",
            ]
        )


def read_run(run: str) -> RunSoFar:
    """The run of this name. Raises InputError for one without records, naming those there are."""
    root = open_store(Settings().store_root).root
    records = open_records(root, run)
    documents, spec = records.all(), records.read_spec()
    if not documents or spec is None:
        known = ", ".join(list_runs(root)) or "none"
        raise InputError(f"run {run} has no committed iteration in {root} (runs there: {known})")
    found = [read_record(document) for document in documents]
    return RunSoFar(run, found, max(int(spec["iterations"]), found[-1].iteration))
