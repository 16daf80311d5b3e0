"""What the collector of a folder lists, finds left behind, and takes from under a reader."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.artifacts import ArtifactMissing, open_store
from infra.artifacts.local_store import LocalStore
from infra.gc.local_collector import UNTOUCHED_NS, LocalCollector
from infra.process_identity import ProcessIdentity, this_process
from infra.runs.local_lease import acquire_lease
from infra.runs.local_runs import LocalRuns
from infra.storage.filesystem import FileSystem
from tests.infra.artifacts.artifact_folders import CONTENT
from tests.infra.runs.leases import somebody, successor
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_process import DiskFiles
from tests.infra.storage.simulated_stores import ROOT, collector_on, fill, fresh_disk, look, open_on, put

SOURCES = Path(__file__).resolve().parents[3]
X = ("scores", "x")


def test_it_lists_artifacts_and_nothing_else():
    disk = fresh_disk()
    put(disk, "scores", "a", CONTENT)
    put(disk, "checkpoint", "b", CONTENT)
    fill(disk, open_on(disk).scratch(), CONTENT)
    fill(disk, ROOT / "checkpoint/half", {"a": b"12345"})
    fill(disk, ROOT, {"notes.txt": b"", "scores/notes.txt": b"", "runs/r/spec.json": b"", "Other/a/b": b""})
    fill(disk, ROOT, {"mlflow/1/0123456789abcdef0123456789abcdef/artifacts/model.bin": b"", "scores/A/b": b""})
    found = collector_on(disk).artifacts()
    assert [(one.kind, one.key) for one in found] == [("checkpoint", "b"), ("checkpoint", "half"), ("scores", "a")]
    assert found[1].bytes == 5
    assert found[2].bytes == sum(map(len, CONTENT.values())) + disk.status(ROOT / "scores/a/manifest.json").size


class Closed(DiskFiles):
    """Lets nobody look into some folders."""

    def names(self, folder: Path) -> list[str]:
        if folder in (ROOT / "scores/closed", ROOT / "rollouts"):
            raise PermissionError(13, "Permission denied", str(folder))
        return super().names(folder)


def test_what_it_may_not_look_into_is_no_artifact_that_can_go():
    disk = fresh_disk()
    put(disk, "scores", "a", CONTENT)
    put(disk, "scores", "closed", CONTENT)
    put(disk, "rollouts", "b", CONTENT)
    found = collector_on(Closed(disk)).artifacts()
    assert [(one.kind, one.key) for one in found] == [("scores", "a")]


def collect_x(files: FileSystem) -> None:
    collector_on(files).collect([X], set)


class Interrupting(DiskFiles):
    """Does something else before one of its operations."""

    def __init__(self, disk: SimulatedDisk, number: int, act: Callable[[SimulatedDisk], object]) -> None:
        super().__init__(disk)
        self._number = number
        self._act = act

    def _do(self, *args: object, **kwargs: object) -> object:
        if len(self.trace) == self._number:
            self._number = -1
            self._act(self._real)
        return super()._do(*args, **kwargs)


def test_a_reader_without_a_pin_finds_the_whole_or_nothing():
    before = fresh_disk()
    ref = put(before, *X, CONTENT)
    for number in itertools.count():
        assert open_on(Interrupting(before.copy(), number, collect_x)).find(*X) in (ref, None)
        fetching = Interrupting(disk := before.copy(), number, collect_x)
        try:
            open_on(fetching).fetch(ref)
        except ArtifactMissing:
            assert look(disk, *X) is None
        if len(fetching.trace) < number:
            break
    assert number > 8


def test_the_pins_of_a_run_behind_a_link_count(tmp_path: Path):
    store = tmp_path / "store"
    acquire_lease(store, "r").pin(*X)
    (store / "runs/r").rename(tmp_path / "elsewhere")
    (store / "runs/r").symlink_to(tmp_path / "elsewhere")
    assert LocalRuns(store).names(started=False) == ["r"]
    assert LocalCollector(store).pinned() == {X}
    (tmp_path / f"elsewhere/leases/.new-{NOBODY.token}-0").mkdir()
    collector = LocalCollector(store, alive=lambda _: False)
    assert collector.orphans() == []  # only what lies in the store is removed


def left_behind(disk: SimulatedDisk, writer: ProcessIdentity) -> list[Path]:
    """What one process had under way: a scratch folder, a new run, a new lease, trash."""
    token = writer.token
    places = [open_on(disk, writer).scratch(), ROOT / f"runs/.new-{token}-0", ROOT / f"runs/r/leases/.new-{token}-0"]
    for place in (*places, trash := ROOT / f"trash/{token}-0"):
        fill(disk, place, {"below/file": b"12345"})
    return [*places, trash]


@pytest.mark.parametrize(("alive", "gone"), [(True, False), (False, True), (None, False)])
def test_orphans_are_those_of_dead_processes(alive: bool | None, gone: bool):
    disk, writer, me = fresh_disk(), somebody(), somebody()
    successor(ROOT, disk)
    disk.make_folder(ROOT / "trash")
    places = left_behind(disk, writer)
    collector = LocalCollector(
        ROOT, files=disk, identity=me, alive=lambda other: other == me or alive, now_ns=lambda: disk.now_ns
    )
    found = collector.orphans()
    assert sorted(Path(one.place) for one in found) == (sorted(places) if gone else [])
    assert all(one.bytes == 5 and f"process {writer.pid} on here" in one.why for one in found)
    assert collector.remove(found) == (20 if gone else 0)
    assert [disk.status(place) is None for place in places] == [gone] * 4
    assert collector.remove(found) == 0


def test_a_scratch_folder_of_a_machine_of_the_same_name_is_no_orphan(tmp_path: Path):
    for machine in ("", "e" * 16):
        other = this_process().model_copy(update={"boot": "f" * 32, "machine": machine})
        LocalStore(tmp_path, writer=other).scratch()
    assert LocalCollector(tmp_path).orphans() == []


def test_what_a_stranger_left_is_an_orphan_after_a_day():
    disk, stranger = fresh_disk(), somebody("elsewhere")
    disk.make_folder(ROOT)
    folder = open_on(disk, stranger).scratch()
    disk.make_folder(unknown := ROOT / "scratch/0123abcd")
    disk.now_ns += UNTOUCHED_NS
    fill(disk, folder, {"below/file": b"12345"})
    touched = disk.now_ns

    def orphans(now_ns: int) -> Iterator[Path]:
        collector = LocalCollector(ROOT, files=disk, identity=NOBODY, alive=lambda _: None, now_ns=lambda: now_ns)
        return (Path(one.place) for one in collector.orphans())

    assert list(orphans(touched)) == [unknown]
    assert list(orphans(touched + UNTOUCHED_NS - 10**6)) == [unknown]
    assert sorted(orphans(touched + UNTOUCHED_NS + 1)) == sorted([unknown, folder])


NOBODY = somebody()


def test_damaged_ones_are_listed_and_removed_when_asked():
    disk = fresh_disk()
    put(disk, *X, CONTENT)
    disk.remove(ROOT / "scores/x/state.json")
    kept = open_on(disk).set_aside(*X)
    collector = collector_on(disk)
    assert collector.orphans() == []
    (damaged,) = collector.damaged()
    assert (Path(damaged.place), damaged.why) == (kept, "damaged, and set aside")
    assert collector.remove([damaged]) == damaged.bytes > 700
    assert collector.damaged() == []


KILLED = """
import sys, time
from infra.artifacts import open_store

folder = open_store(sys.argv[1]).scratch()
(folder / "file").write_text("12345")
print(folder, flush=True)
time.sleep(3600)
"""


def test_the_scratch_folder_of_a_killed_process_is_found(tmp_path: Path):
    own = open_store(tmp_path).scratch()
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=SOURCES, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    folder = Path(writer.stdout.readline().strip())
    collector = LocalCollector(tmp_path)
    assert collector.orphans() == []
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    (orphan,) = collector.orphans()
    assert (Path(orphan.place), orphan.bytes) == (folder, 5)
    assert collector.remove([orphan]) == 5
    assert os.listdir(tmp_path / "scratch") == [own.name]
    assert os.listdir(tmp_path / "trash") == []
