"""What the records of all runs need, and what may go: superseded checkpoints, and what nobody names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from infra.artifacts import ArtifactError, ArtifactRef, ArtifactStore, open_store
from infra.collector import Collector, Leftover, StoredArtifact
from infra.runs import RunRecords, list_runs
from infra.settings import Settings
from ppo_core.spec import CheckpointSpec
from tasks.iteration_record import IterationRecord, read_record
from tasks.workbench import Workbench

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


def needed_by(store: ArtifactStore, records: list[IterationRecord]) -> set[Name]:
    """The artifacts that a run's records need. What was sampled, scored and evaluated is small, and always kept."""
    kept = kept_iterations(records)
    refs: list[ArtifactRef | None] = []
    for record in records:
        refs += [record.dataset, record.reference, record.rollouts, record.scores, record.evaluation]
        if record.evaluation is not None:
            refs += inputs_of(store, record.evaluation)
        if record.iteration in kept:
            refs += [record.checkpoint, record.experience, record.base, *record.replay]
    return {(ref.kind, ref.key) for ref in refs if ref is not None}


def inputs_of(store: ArtifactStore, ref: ArtifactRef) -> list[ArtifactRef]:
    """What an artifact was made from, but for checkpoints; nothing where it is missing or damaged itself."""
    try:
        return [given for given in store.manifest(ref.model_copy()).inputs if given.kind != "checkpoint"]
    except ArtifactError:
        return []


def needed_by_runs(store: ArtifactStore) -> set[Name]:
    """What the records of all runs need, diverged iterations (kept as evidence) included."""
    needed: set[Name] = set()
    for run in list_runs(store.root):
        records = RunRecords(store.root, run)
        needed |= needed_by(store, [read_record(document) for document in records.all()])
        for note in records.notes("divergences"):
            if note["record"] is not None:
                needed |= needed_by(store, [read_record(note["record"])])
    return needed


def release(bench: Workbench) -> list[StoredArtifact]:
    """Remove what the run's own retention has let go and no other record needs. Called after each commit."""
    rule: CheckpointSpec = bench.spec.checkpoint
    if rule.keep_last is None:
        return []
    records = [read_record(document) for document in bench.records.all()]
    kept = kept_iterations(records)
    gone = [record for record in records if record.iteration not in kept]
    wanted = {(ref.kind, ref.key) for r in gone for ref in (r.checkpoint, r.experience) if ref is not None}
    present = {name for name in wanted if bench.store.find(*name) is not None}
    if not present - needed_by(bench.store, records):
        return []
    return Collector(bench.store.root).collect(present, lambda: needed_by_runs(bench.store))


@dataclass(frozen=True)
class Garbage:
    """What no record needs and nobody uses."""

    artifacts: list[StoredArtifact]
    leftovers: list[Leftover]
    damaged: list[Leftover] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(size for _, size, _ in self.rows())

    def rows(self) -> list[tuple[str, int, str]]:
        """What, how many bytes, and why."""
        unneeded = [(f"{found.kind}/{found.key}", found.bytes, "no record needs it") for found in self.artifacts]
        others = [(str(found.path), found.bytes, found.why) for found in (*self.leftovers, *self.damaged)]
        return [*unneeded, *others]


def find_garbage(*, damaged: bool = False) -> Garbage:
    """Look only. `damaged`: also what was set aside."""
    store, collector = opened()
    unneeded = collector.pinned() | needed_by_runs(store)
    artifacts = [found for found in collector.artifacts() if (found.kind, found.key) not in unneeded]
    return Garbage(artifacts, collector.leftovers(), collector.damaged() if damaged else [])


def remove_garbage(garbage: Garbage) -> int:
    """Remove what is still garbage. Returns the bytes that are free now."""
    store, collector = opened()
    wanted: Iterable[Name] = [(found.kind, found.key) for found in garbage.artifacts]
    removed = collector.collect(wanted, lambda: needed_by_runs(store))
    return sum(found.bytes for found in removed) + collector.remove([*garbage.leftovers, *garbage.damaged])


def opened() -> tuple[ArtifactStore, Collector]:
    """The store of the settings, and its collector."""
    store = open_store(Settings().store_root)
    return store, Collector(store.root)
