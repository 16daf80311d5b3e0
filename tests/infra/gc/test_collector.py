"""What the collector removes, and what it never does."""

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
from infra.gc.local_collector import UNTOUCHED_NS, LocalCollector
from infra.process_identity import ProcessIdentity
from infra.runs.local_records import LocalRecords
from infra.storage.filesystem import FileSystem
from tests.infra.artifacts.artifact_folders import CONTENT
from tests.infra.runs.leases import somebody, successor
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_process import DiskFiles, Process
from tests.infra.storage.simulated_stores import ROOT, collector_on, fill, fresh_disk, look, open_on, put

SOURCES = Path(__file__).resolve().parents[3]
X = ("scores", "x")


def test_it_lists_artifacts_and_nothing_else():
    disk = fresh_disk()
    assert (collector_on(disk).artifacts(), collector_on(disk).collect([X], set)) == ([], [])
    put(disk, "scores", "a", CONTENT)
    put(disk, "checkpoint", "b", CONTENT)
    fill(disk, open_on(disk).scratch(), CONTENT)
    fill(disk, ROOT / "checkpoint/half", {"a": b"12345"})
    fill(disk, ROOT, {"notes.txt": b"", "scores/notes.txt": b"", "runs/r/spec.json": b"", "Other/a/b": b""})
    found = collector_on(disk).artifacts()
    assert [(one.kind, one.key) for one in found] == [("checkpoint", "b"), ("checkpoint", "half"), ("scores", "a")]
    assert found[1].bytes == 5
    assert found[2].bytes == sum(map(len, CONTENT.values())) + disk.status(ROOT / "scores/a/manifest.json").size


def test_it_removes_what_is_wanted_and_neither_needed_nor_pinned():
    disk = fresh_disk()
    for key in "abcde":
        put(disk, "scores", key, CONTENT)
    leases = {run: successor(ROOT, disk, run) for run in ("r1", "r2", "r3")}
    leases["r1"].pin("scores", "a")
    leases["r2"].pin("scores", "b")
    leases["r3"].pin("scores", "c")
    leases["r3"].release()
    collector = collector_on(disk)
    assert collector.pinned() == {("scores", "a"), ("scores", "b")}
    wanted = [("scores", key) for key in "abcd"] + [("scores", "never"), ("other", "a")]
    assert [one.key for one in collector.collect(wanted, lambda: {("scores", "d")})] == ["c"]
    assert [look(disk, "scores", key) == CONTENT for key in "abcde"] == [True, True, False, True, True]
    leases["r1"].unpin_all()
    leases["r2"].release()
    assert [one.key for one in collector.collect(wanted, set)] == ["a", "b", "d"]
    assert put(disk, "scores", "a", CONTENT).key == "a", "it can be made again"


def test_what_cannot_be_asked_stops_a_collection():
    disk = fresh_disk()
    put(disk, *X, CONTENT)

    def damaged() -> set[tuple[str, str]]:
        raise RuntimeError("record 3 is damaged")

    with pytest.raises(RuntimeError, match="record 3"):
        collector_on(disk).collect([X], damaged)
    assert look(disk, *X) == CONTENT
    assert disk.locked == set()


class Stage:
    """Finds or makes an artifact as a task does, and commits a record that names it."""

    def __init__(self, files: DiskFiles) -> None:
        self.files = files
        self.lease = successor(ROOT, files)

    def find_or_put(self) -> None:
        store = open_on(self.files)
        ref = store.find(*X)
        if ref is None:
            put(self.files, *X, CONTENT)
        else:
            store.fetch(ref)

    def commit(self) -> None:
        records = LocalRecords(ROOT, "r", files=self.files, lease=self.lease)
        records.commit(0, {"names": X})
        self.lease.unpin_all()

    def work(self) -> None:
        self.lease.pin(*X)
        self.find_or_put()
        self.commit()

    def work_wrongly(self) -> None:
        """Looks before it pins."""
        if open_on(self.files).find(*X) is None:
            put(self.files, *X, CONTENT)
        self.lease.pin(*X)
        self.commit()


def named(files: FileSystem) -> set[tuple[str, str]]:
    return {(kind, key) for record in LocalRecords(ROOT, "r", files=files).all() for kind, key in [record["names"]]}


Work = Callable[[Stage], None]
Search = Callable[[Process], None]


def collect_x(files: FileSystem) -> None:
    collector_on(files).collect([X], lambda: named(files))


def collect_wrongly(files: Process) -> None:
    """Asks the records before nothing can be pinned any more."""
    before = named(files)
    collector_on(files).collect([X], lambda: before)


def meet(steps: int, *, collector_first: bool, there: bool, work: Work = Stage.work, search: Search = collect_x) -> int:
    """One side does this many operations, the other all it can, then both end; how many the first one did."""
    disk = fresh_disk()
    put(disk, *(X if there else ("scores", "other")), CONTENT)
    stage, collector = Process(disk), Process(disk)
    working = Stage(stage)
    stage.begin("stage", lambda: work(working))
    collector.begin("collect", lambda: search(collector))
    first, second = (collector, stage) if collector_first else (stage, collector)
    before = len(first.trace)
    first.step(steps)
    done = len(first.trace) - before
    for process in (second, first, second):
        if process.work is not None:
            process.step(10_000)
    assert (first.work, second.work) == (None, None)
    assert named(disk) == {X}
    assert look(disk, *X) == CONTENT, f"after {steps} operations"
    return done


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("collector_first", [True, False])
def test_what_a_record_names_is_never_removed_wherever_stage_and_collector_meet(collector_first: bool, there: bool):
    for steps in itertools.count():
        if meet(steps, collector_first=collector_first, there=there) < steps:
            break
    assert steps > 8


def meet_everywhere(*, collector_first: bool, work: Work = Stage.work, search: Search = collect_x) -> None:
    for steps in range(200):
        meet(steps, collector_first=collector_first, there=True, work=work, search=search)


def test_a_stage_or_a_collector_that_does_it_wrongly_would_lose():
    with pytest.raises(AssertionError, match=r"after \d+ operations"):
        meet_everywhere(collector_first=False, work=Stage.work_wrongly)
    with pytest.raises(AssertionError, match=r"after \d+ operations"):
        meet_everywhere(collector_first=True, search=collect_wrongly)


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


def left_behind(disk: SimulatedDisk, writer: ProcessIdentity) -> list[Path]:
    """What one process had under way: a scratch folder, a new run, a new lease, trash."""
    token = writer.token
    places = [open_on(disk, writer).scratch(), ROOT / f"runs/.new-{token}-0", ROOT / f"runs/r/leases/.new-{token}-0"]
    for place in (*places, trash := ROOT / f"trash/{token}-0"):
        fill(disk, place, {"below/file": b"12345"})
    return [*places, trash]


@pytest.mark.parametrize(("alive", "gone"), [(True, False), (False, True), (None, False)])
def test_leftovers_are_those_of_dead_processes(alive: bool | None, gone: bool):
    disk, writer, me = fresh_disk(), somebody(), somebody()
    successor(ROOT, disk)
    disk.make_folder(ROOT / "trash")
    places = left_behind(disk, writer)
    collector = LocalCollector(
        ROOT, files=disk, identity=me, alive=lambda other: other == me or alive, now_ns=lambda: disk.now_ns
    )
    found = collector.leftovers()
    assert sorted(Path(one.place) for one in found) == (sorted(places) if gone else [])
    assert all(one.bytes == 5 and f"process {writer.pid} on here" in one.why for one in found)
    assert collector.remove(found) == (20 if gone else 0)
    assert [disk.status(place) is None for place in places] == [gone] * 4
    assert collector.remove(found) == 0


def test_what_a_stranger_left_is_a_leftover_after_a_day():
    disk, stranger = fresh_disk(), somebody("elsewhere")
    disk.make_folder(ROOT)
    folder = open_on(disk, stranger).scratch()
    disk.make_folder(unknown := ROOT / "scratch/0123abcd")
    disk.now_ns += UNTOUCHED_NS
    fill(disk, folder, {"below/file": b"12345"})
    touched = disk.now_ns

    def leftovers(now_ns: int) -> Iterator[Path]:
        collector = LocalCollector(ROOT, files=disk, identity=NOBODY, alive=lambda _: None, now_ns=lambda: now_ns)
        return (Path(one.place) for one in collector.leftovers())

    assert list(leftovers(touched)) == [unknown]
    assert list(leftovers(touched + UNTOUCHED_NS - 10**6)) == [unknown]
    assert sorted(leftovers(touched + UNTOUCHED_NS + 1)) == sorted([unknown, folder])


NOBODY = somebody()


def test_damaged_ones_are_listed_and_removed_when_asked():
    disk = fresh_disk()
    put(disk, *X, CONTENT)
    disk.remove(ROOT / "scores/x/state.json")
    kept = open_on(disk).set_aside(*X)
    collector = collector_on(disk)
    assert collector.leftovers() == []
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
    assert collector.leftovers() == []
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    (leftover,) = collector.leftovers()
    assert (Path(leftover.place), leftover.bytes) == (folder, 5)
    assert collector.remove([leftover]) == 5
    assert os.listdir(tmp_path / "scratch") == [own.name]
    assert os.listdir(tmp_path / "trash") == []
