"""Every operation of a collection fails, or is the last one of its process.

Afterwards each artifact is whole or gone, what is needed or pinned is whole, and the same call again succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from infra.gc.collector import StoredArtifact
from infra.gc.local_collector import LocalCollector
from tests.infra.artifacts.artifact_folders import CONTENT
from tests.infra.runs.leases import somebody, successor
from tests.infra.storage.faulty_files import FAULTS, Died
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_process import DiskFiles
from tests.infra.storage.simulated_stores import ROOT, collector_on, fill, fresh_disk, look, open_on, put

KEYS = ("a", "b", "needed", "pinned")
GONE = ("a", "b")


def scene() -> SimulatedDisk:
    """Four artifacts, of which one is pinned, a damaged one that was set aside, and a dead process's scratch folder."""
    disk = fresh_disk()
    for key in (*KEYS, "damaged"):
        put(disk, "scores", key, CONTENT)
    successor(ROOT, disk).pin("scores", "pinned")
    disk.remove(ROOT / "scores/damaged/state.json")
    store = open_on(disk)
    store.set_aside("scores", "damaged")
    fill(disk, store.scratch(), CONTENT)
    return disk


def collect(collector: LocalCollector) -> list[StoredArtifact]:
    return collector.collect([("scores", key) for key in KEYS], lambda: {("scores", "needed")})


def clear(collector: LocalCollector) -> None:
    collector.remove(collector.orphans())
    collector.remove(collector.damaged())


def again(disk: SimulatedDisk, act: Callable[[LocalCollector], object]) -> None:
    """A new process that finds all others dead does the same."""
    act(collector_on(disk, somebody()))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("act", [collect, clear])
def test_each_artifact_is_whole_or_gone_at_every_operation(act: Callable[[LocalCollector], object], fault: str):
    before = scene()
    counting = DiskFiles(before.copy())
    act(collector_on(counting, somebody()))
    allowed = {key: (CONTENT, None if act is collect and key in GONE else CONTENT) for key in KEYS}
    assert len(counting.trace) > 2
    for number in range(1, len(counting.trace) + 1):
        disk = before.copy()
        with suppress(OSError, Died):
            act(collector_on(DiskFiles(disk, number, fault), somebody()))
        for key in KEYS:
            assert look(disk, "scores", key) in allowed[key], f"operation {number}: {counting.trace[number - 1]}"
        again(disk, act)
        for key in KEYS:
            assert look(disk, "scores", key) == allowed[key][1]
        again(disk, clear)
        assert [disk.names(ROOT / name) for name in ("trash", "scratch", "damaged")] == [[], [], []]
