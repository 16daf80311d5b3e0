"""What the records of all runs of a store need. Records never change, so each is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from infra.artifacts import ArtifactError, ArtifactRef, ArtifactStore
from infra.runs import RunRecords, Runs, open_runs
from tasks.iteration_record import IterationRecord, read_record
from tasks.promoted import Promoted

Name = tuple[str, str]


def kept_iterations(records: list[IterationRecord]) -> set[int]:
    """The iterations whose training state the last record's retention keeps: the last ones, every so many, the best.

    Of each of these also the best until then: whoever goes back to it goes on with that best.
    """
    if not records:
        return set()
    rule = records[-1].retention
    if rule.keep_last is None:
        return {record.iteration for record in records}
    kept = {record.iteration for record in records[-rule.keep_last :]}
    if rule.keep_every is not None:
        kept |= {record.iteration for record in records if record.iteration % rule.keep_every == 0}
    return kept | {record.best.iteration for record in records if record.iteration in kept}


class Needs:
    """What the runs of a store need; remembers what it has read, so that asking again costs what is new."""

    def __init__(
        self,
        store: ArtifactStore,
        runs: Runs | None = None,
        promoted: Callable[[], set[Name]] | None = None,
    ) -> None:
        self._store = store
        self._runs = open_runs(store.root) if runs is None else runs
        self._opened: dict[str, RunRecords] = {}
        self._records: dict[tuple[str, str], IterationRecord | None] = {}
        self._inputs: dict[Name, list[ArtifactRef]] = {}
        self._promoted = Promoted(store.root).needs if promoted is None else promoted

    def of_all(self) -> set[Name]:
        """What the records of all runs need, diverged iterations (kept as evidence) included."""
        needed: set[Name] = set()
        for run in self._runs.names(started=False):
            if run not in self._opened:
                self._opened[run] = self._runs.records(run)
            contents = self._opened[run].contents()
            needed |= self.of(self._read(self._opened[run], contents.iterations.values()))
            for record in self._read(self._opened[run], contents.notes.get("divergences", ())):
                needed |= self.of([record])
        return needed | self._promoted()

    def of(self, records: list[IterationRecord]) -> set[Name]:
        """What a run's records need. What was sampled, scored and evaluated is small, and always kept."""
        kept = kept_iterations(records)
        refs: list[ArtifactRef | None] = []
        for record in records:
            refs += [record.dataset, record.reference, record.rollouts, record.scores, record.evaluation]
            if record.evaluation is not None:
                refs += self._inputs_of(record.evaluation)
            if record.iteration in kept:
                refs += [record.checkpoint, record.experience, record.base, *record.replay]
        return {(ref.kind, ref.key) for ref in refs if ref is not None}

    def records_of(self, records: RunRecords) -> list[IterationRecord]:
        """A run's records, in order."""
        return self._read(records, records.contents().iterations.values())

    def _read(self, records: RunRecords, marks: Iterable[str]) -> list[IterationRecord]:
        marks = list(marks)
        new = [mark for mark in marks if (records.run, mark) not in self._records]
        for mark, document in zip(new, records.marked(new), strict=True):
            # The note of a diverged iteration holds its record, if it came to one.
            told = document["record"] if document is not None and "record" in document else document
            self._records[records.run, mark] = None if told is None else read_record(told)
        found = [self._records[records.run, mark] for mark in marks]
        return [record for record in found if record is not None]

    def _inputs_of(self, ref: ArtifactRef) -> list[ArtifactRef]:
        """What an artifact was made from, but for checkpoints; nothing where it is missing or damaged itself."""
        name = ref.kind, ref.key
        if name not in self._inputs:
            try:
                inputs = self._store.manifest(ref.model_copy()).inputs
            except ArtifactError:
                return []
            self._inputs[name] = [given for given in inputs if given.kind != "checkpoint"]
        return self._inputs[name]
