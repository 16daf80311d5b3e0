"""The power goes at any operation: what had returned is there and whole, all else is whole or absent.

Each case runs some calls on a simulated disk, cuts the power around one operation, and looks at what the next start of
the machine finds: for each thing the state before the call that was under way, or the one after it. Then the same
calls again succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from infra.artifacts import ArtifactRef
from infra.process_identity import ProcessIdentity
from infra.runs.local_lease import acquire_lease
from infra.runs.local_lease_folders import LeaseFolders
from infra.runs.local_records import LocalRecords
from infra.runs.local_runs import LocalRuns
from infra.runs.records import NOTES, RecordExists
from infra.storage.filesystem import remove_tree
from tests.infra.artifacts.artifact_folders import CONTENT
from tests.infra.runs.leases import StillClock, somebody
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.simulated_disk import SimulatedDisk
from tests.infra.storage.simulated_process import DiskFiles
from tests.infra.storage.simulated_stores import DAMAGED, ROOT, collector_on, fill, fresh_disk, look, open_on, put, read

pytestmark = pytest.mark.thorough
SEEDS = 1000
OTHER, NOTE = {"a.txt": b"somebody was faster"}, {"rollbacks": [{"to": 0}]}
FAULTS = ("dies before", "dies half-way", "dies after")
ELSEWHERE = ROOT.parent / "mine"
State = dict[str, object]


class Program(DiskFiles):
    """A process, and the records of the run that it holds."""

    def __init__(self, disk: SimulatedDisk, at: int = 0, fault: str = "dies before") -> None:
        super().__init__(disk, at, fault)
        self.disk = disk
        self.held: LocalRecords | None = None
        self._other_disk = ELSEWHERE

    @property
    def records(self) -> LocalRecords:
        """The records of run r, which this process takes over when it first asks for them."""
        if self.held is None:
            lease = acquire_lease(ROOT, "r", files=self, identity=somebody(), alive=lambda _: False)
            self.held = LocalRecords(ROOT, "r", files=self, lease=lease)
        return self.held


Step = Callable[[Program], object]


@dataclass(frozen=True)
class Scenario:
    """Some calls, what must be there before them, and what a new process sees of each thing that they change."""

    steps: Sequence[Step]
    see: Callable[[SimulatedDisk], State]
    prepare: Step = lambda files: None


def put_from_scratch(files: Program) -> ArtifactRef:
    return put(files, "scores", "k", CONTENT)


def put_from_elsewhere(files: Program) -> ArtifactRef:
    if files.status(ELSEWHERE) is not None:
        remove_tree(files, ELSEWHERE)
    return open_on(files).put(fill(files, ELSEWHERE, CONTENT), "scores", "far")


def put_another(files: Program) -> ArtifactRef:
    return put(files, "checkpoint", "k", OTHER)


def see_artifacts(disk: SimulatedDisk) -> State:
    places = [("scores", "k"), ("scores", "far"), ("checkpoint", "k")]
    found: State = {"/".join(place): look(disk, *place) for place in places}
    assert DAMAGED not in found.values()
    return found


def with_a_damaged_one(files: Program) -> None:
    put(files, "scores", "k", OTHER)
    files.disk.overwrite(ROOT / "scores/k/a.txt", b"Somebody was faster")


def put_over_it(files: Program) -> ArtifactRef:
    return put(files, "scores", "k", CONTENT)


def set_it_aside(files: Program) -> None:
    open_on(files).set_aside("scores", "k")


def see_what_was_damaged(disk: SimulatedDisk) -> State:
    aside = ROOT / "damaged/scores-k-1"
    kept = disk.status(aside) is not None
    here = look(disk, "scores", "k")
    assert kept != (here == DAMAGED), "neither here nor there, or both"
    if kept:
        assert read(disk, aside) == {"a.txt": b"Somebody was faster"}
    return {"here": None if here == DAMAGED else here, "aside": kept}


def with_three_records(files: Program) -> None:
    for iteration in range(3):
        commit(iteration)(files)


def commit(iteration: int, version: str = "first") -> Step:
    def step(files: Program) -> None:
        with suppress(RecordExists):
            files.records.commit(iteration, {"iteration": iteration, "version": version})

    return step


def create_spec(files: Program) -> None:
    with suppress(RecordExists):
        files.records.create_spec({"seed": 1})


def supersede(files: Program) -> None:
    files.records.supersede(0)


def note_once(files: Program) -> None:
    records = files.records
    if not records.notes("rollbacks"):
        records.note("rollbacks", {"to": 0})


def fork(files: Program) -> None:
    with suppress(RecordExists):
        LocalRuns(ROOT, files=files).create("fork", {"seed": 2}, {n: {"iteration": n} for n in (0, 1)}, NOTE)


def see_runs(disk: SimulatedDisk) -> State:
    records = LocalRecords(ROOT, "r", files=disk)
    assert records.iterations() == list(range(len(records.iterations()))), "a gap in the records"
    found: State = {f"iteration {iteration}": records.read(iteration) for iteration in records.iterations()}
    found |= {kind: records.notes(kind) or None for kind in NOTES}
    found["spec"] = records.read_spec()
    if "fork" in (runs := LocalRuns(ROOT, files=disk)).names():
        found["fork"] = ((new := runs.records("fork")).read_spec(), new.all(), new.notes("rollbacks"))
    return found


def with_three_artifacts(files: Program) -> None:
    for key in ("a", "b", "kept"):
        put(files, "scores", key, CONTENT)
    open_on(files, somebody()).scratch()


def collect(files: Program) -> None:
    collector_on(files).collect(
        [("scores", key) for key in ("a", "b", "kept", "never was")], lambda: {("scores", "kept")}
    )


def with_a_dead_collector(files: Program) -> None:
    """It died after it had moved two artifacts into the trash, and before that was durable."""
    with_three_artifacts(files)
    counting = Program(files.disk.copy())
    collect(counting)
    moved = max(number for number, operation in enumerate(counting.trace, 1) if operation.name == "rename")
    with pytest.raises(Died):
        collect(Program(files.disk, moved, "dies after"))


def see_no_half(disk: SimulatedDisk) -> State:
    """Whether the two come back is open."""
    return {"kept": see_collected(disk)["kept"]}


def remove_orphans(files: Program) -> None:
    collector = collector_on(files, somebody())
    collector.remove(collector.orphans())


def see_collected(disk: SimulatedDisk) -> State:
    found: State = {key: look(disk, "scores", key) for key in ("a", "b", "kept")}
    assert found["kept"] == CONTENT
    assert DAMAGED not in found.values()
    return found


SCENARIOS = {
    "put": Scenario((put_from_scratch, put_from_elsewhere, put_another), see_artifacts),
    "put over a damaged one": Scenario((put_over_it,), see_what_was_damaged, with_a_damaged_one),
    "set aside": Scenario((set_it_aside,), see_what_was_damaged, with_a_damaged_one),
    "commit": Scenario((create_spec, *(commit(iteration) for iteration in range(3)), note_once), see_runs),
    "roll back": Scenario((supersede, note_once, commit(1, "second")), see_runs, with_three_records),
    "fork": Scenario((fork,), see_runs),
    "collect": Scenario((collect, remove_orphans), see_collected, with_three_artifacts),
    "clear up": Scenario((remove_orphans, remove_orphans), see_no_half, with_a_dead_collector),
}


@dataclass(frozen=True)
class Course:
    """A scenario without a fault: the disk before it, what is seen before and after each step, the operations."""

    disk: SimulatedDisk
    seen: list[State]
    operations: int


@cache
def course(name: str) -> Course:
    scenario, disk = SCENARIOS[name], fresh_disk()
    scenario.prepare(Program(disk))
    start, files = disk.copy(), Program(disk)
    seen = [scenario.see(disk)]
    for step in scenario.steps:
        step(files)
        seen.append(scenario.see(disk))
    return Course(start, seen, len(files.trace))


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_returned_is_there_and_the_rest_is_whole_or_absent(name: str):
    scenario, whole = SCENARIOS[name], course(name)
    for seed in range(SEEDS):
        dice = Random(seed)
        disk, done = whole.disk.copy(), 0
        files = Program(disk, dice.randint(1, whole.operations + 1), dice.choice(FAULTS))
        with suppress(Died):
            for step in scenario.steps:
                step(files)
                done += 1
        found = disk.after_power_cut(seed)
        before, after = whole.seen[done], whole.seen[min(done + 1, len(scenario.steps))]
        seen = scenario.see(found)
        for thing in {*before, *after, *seen}:
            assert seen.get(thing) in (before.get(thing), after.get(thing)), f"seed {seed}, step {done}: {thing}"
        files = Program(found)
        for step in scenario.steps[done:]:
            step(files)
        again = found.after_power_cut(seed)
        assert scenario.see(found) == scenario.see(again) == whole.seen[-1], f"seed {seed}, step {done}, again"


def holders(disk: SimulatedDisk, me: ProcessIdentity) -> tuple[list[ProcessIdentity], int]:
    """Who seems to have the run, and the highest number that was given."""
    folders = LeaseFolders(ROOT, "r", me, disk)
    if disk.status(folders.folder) is None:
        return [], 0
    numbers = folders.numbers()
    found = [holder for number in numbers.live if (holder := folders.holder(number)) is not None]
    return [holder.identity for holder in found], numbers.highest


def pass_on(files: Program, log: list[tuple[str, ProcessIdentity, int]]) -> None:
    """Three processes have the run one after the other: two by taking it over, one after a release."""
    for ending in ("dies", "releases", "dies"):
        me = somebody()
        lease = acquire_lease(
            ROOT, "r", files=files, identity=me, alive=lambda _: False, clock=StillClock().clock, note={"how": ending}
        )
        log.append(("acquired", me, lease.number))
        LocalRecords(ROOT, "r", files=files, lease=lease).note("rollbacks", {"lease": lease.number})
        if ending == "releases":
            lease.release()
            log.append(("released", me, lease.number))


def test_a_lease_that_was_given_is_given_and_one_that_was_ended_is_ended():
    disk = fresh_disk()
    files = Program(disk)
    pass_on(files, [])
    operations = len(files.trace)
    for seed in range(SEEDS):
        dice, disk, log = Random(seed), fresh_disk(), []
        with suppress(Died):
            pass_on(Program(disk, dice.randint(1, operations + 1), dice.choice(FAULTS)), log)
        found = disk.after_power_cut(seed)
        seen, highest = holders(found, somebody())
        known = [entry for entry in log if entry[0] == "acquired"]
        if log:
            what, me, number = log[-1]
            assert highest >= number
            assert set(seen).isdisjoint(identity for _, identity, _ in known[:-1]), f"seed {seed}: an ended lease"
            assert what == "acquired" or me not in seen, f"seed {seed}: a released lease"
        notes = LocalRecords(ROOT, "r", files=found).notes("rollbacks")
        assert [note["lease"] for note in notes] in ([entry[2] for entry in known[:count]] for count in (-1, None))
        me = somebody()
        lease = acquire_lease(ROOT, "r", files=Program(found), identity=me, alive=lambda _: False)
        assert lease.number > max([0, *(number for _, _, number in log)])
        assert holders(found.after_power_cut(seed), me) == ([me], lease.number)
