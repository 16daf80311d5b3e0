"""What may go of a store: superseded checkpoints, and what no record of any run names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefect.logging import get_run_logger

from infra.artifacts import ArtifactStore, StoreReadOnly, open_store
from infra.backend import open_collector
from infra.gc.collector import Collector, Orphan, PinsUnreadable, StoredArtifact
from infra.gc.local_collector import LocalCollector
from infra.runs.records import RecordError
from infra.settings import Settings
from infra.storage.objects import StoreUnavailable
from tasks.runs.reachability import Name, Reachability, kept_iterations
from tasks.stages.context import RunContext
from tasks.stages.table import BY_NAME

VERIFY = "verify"
"""The folder below PPOFLOW_HOME in which iterations are made again to compare them, and nothing else is."""
HOLDERS = "a process that has a run"
"""Whose needs its pins tell."""


def release(context: RunContext, needs: Reachability) -> list[StoredArtifact]:
    """Remove what the run's own retention has let go and no other record needs. Called after each commit.

    What was asked for once is not asked for again: where another run needs it, that one's own retention lets it go.
    While records or pins of another run cannot be read (`needs.unreadable`), nothing goes; it never ends this
    run.
    """
    if context.spec.checkpoint.keep_last is None:
        return []
    records = needs.records_of(context.records)
    kept = kept_iterations(records)
    gone = [record for record in records if record.iteration not in kept]
    wanted = {(ref.kind, ref.key) for r in gone for stage, ref in r.artifacts.items() if not BY_NAME[stage].kept}
    wanted -= context.released | needs.of(records)
    if not wanted:
        return []
    try:
        removed = context.collector.collect(wanted, needs.among(wanted))
    except PinsUnreadable as error:
        needs.unreadable[HOLDERS] = str(error)
        return []
    except (OSError, StoreReadOnly) as error:
        get_run_logger().warning("checkpoints that no run needs could not be removed: %s", error)
        return []
    if not needs.unreadable:
        context.released.update(wanted)
    return removed


@dataclass(frozen=True)
class Garbage:
    """What no record needs and nobody uses. Where records are `unreadable`, every artifact may be needed.

    `left_here` is what a `verify` that was killed has left in this machine's own folder.
    """

    artifacts: list[StoredArtifact]
    orphans: list[Orphan]
    damaged: list[Orphan] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    left_here: list[Orphan] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(size for _, size, _ in self.rows())

    def rows(self) -> list[tuple[str, int, str]]:
        """What, how many bytes, and why."""
        unneeded = [(f"{found.kind}/{found.key}", found.bytes, "no record needs it") for found in self.artifacts]
        others = [(found.place, found.bytes, found.why) for found in (*self.orphans, *self.left_here, *self.damaged)]
        return [*unneeded, *others]


def find_garbage(*, damaged: bool = False) -> Garbage:
    """Look only. `damaged`: also what was set aside."""
    store, collector = opened()
    # On S3 this asks for the server's time, by writing: who may not write is refused before all is read.
    orphans = collector.orphans()
    stored, needs = collector.artifacts(), Reachability(store)
    # Pins go once a record names what they keep: so read the pins first.
    names, pins = {(found.kind, found.key) for found in stored}, dict[str, str]()
    try:
        kept = collector.pinned()
    except PinsUnreadable as error:
        kept, pins = names, {HOLDERS: str(error)}
    kept = kept | needs.among(names)()
    artifacts = [found for found in stored if (found.kind, found.key) not in kept]
    aside = collector.damaged() if damaged else []
    left_here = [found for found in LocalCollector(Settings().home / VERIFY).orphans() if found not in orphans]
    return Garbage(artifacts, orphans, aside, pins | needs.unreadable, left_here)


def remove_garbage(garbage: Garbage) -> int:
    """Remove what is still garbage. Returns the bytes that are free now."""
    store, collector = opened()
    wanted: Iterable[Name] = [(found.kind, found.key) for found in garbage.artifacts]
    removed = collector.collect(wanted, Reachability(store).among(wanted))
    freed = collector.remove([*garbage.orphans, *garbage.damaged])
    freed += LocalCollector(Settings().home / VERIFY).remove(garbage.left_here)
    return sum(found.bytes for found in removed) + freed


def opened() -> tuple[ArtifactStore, Collector]:
    """The store of the settings, and its collector."""
    store = open_store(Settings().store_root)
    return store, open_collector(store.root)


def remove_orphans(context: RunContext) -> int:
    """Remove what processes that are gone have left half written; the bytes that are free now. Never ends a run."""
    try:
        collectors: tuple[Collector, ...] = (context.collector, LocalCollector(context.settings.home / VERIFY))
        return sum(collector.remove(collector.orphans(quickly=True)) for collector in collectors)
    except (OSError, StoreReadOnly, StoreUnavailable, RecordError) as error:
        get_run_logger().warning("what dead processes have left in the store could not be removed: %s", error)
        return 0
