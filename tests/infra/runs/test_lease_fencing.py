"""A holder that was stopped past its lease and then goes on can change nothing, wherever it was stopped."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.runs.lease import LeaseHeld, LeaseLost
from infra.runs.local_lease import LocalLease, acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.records import RecordExists
from tests.infra.programs import Program
from tests.infra.runs.leases import InterruptedFiles, holds, somebody, state, successor, writer
from tests.infra.storage.faulty_files import FaultyFiles

CHANGES: dict[str, Callable[[LocalRecords], Any]] = {
    "create_spec": lambda records: records.create_spec({"lease": 1}),
    "first commit": lambda records: records.commit(0, {"lease": 1}),
    "commit": lambda records: records.commit(3, {"lease": 1}),
    "supersede": lambda records: records.supersede(0),
    "first note": lambda records: records.note("divergences", {"lease": 1}),
    "note": lambda records: records.note("rollbacks", {"lease": 1}),
}


def prepared(root: Path, change: str) -> None:
    """A run in which this change can be made."""
    if change != "create_spec":
        records = writer(root)
        for iteration in range(0 if change == "first commit" else 3):
            records.commit(iteration, {"lease": 0})
        if change == "note":
            records.note("rollbacks", {"lease": 0})


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_happens_before_the_takeover_or_never(tmp_path: Path, change: str, goes_on: bool):
    for number in itertools.count(1):
        root = tmp_path / str(number)
        prepared(root, change)
        before = state(root)
        seen: list[tuple[object, ...]] = []

        def take_over(root: Path = root, seen: list[tuple[object, ...]] = seen) -> None:
            records = writer(root)
            seen.append(state(root))
            if goes_on:
                # The successor does the same again, or as much of it as is left to do.
                with suppress(RecordExists):
                    CHANGES[change](records)
                seen[0] = state(root)

        files = InterruptedFiles(take_over)
        lease = successor(root, files)
        start = len(files.trace)
        files.arm(number)
        outcome = None
        try:
            CHANGES[change](LocalRecords(root, "r", files=files, lease=lease))
        except LeaseLost as lost:
            outcome = lost
        if not seen:
            assert outcome is None
            assert len(files.trace) - start < number
            break
        assert state(root) == seen[0], f"changed after the takeover, before {files.trace[start + number - 1]}"
        if not goes_on:
            assert outcome is not None or seen[0] != before, "nothing done, and nothing said"
        with pytest.raises(LeaseLost):
            lease.check()
        with pytest.raises(LeaseLost):
            LocalRecords(root, "r", files=files, lease=lease).commit(77, {})
        assert state(root) == seen[0]
    assert number > 4, "there were operations to interrupt"


USES: dict[str, Callable[[LocalLease], None]] = {
    "beat": LocalLease.beat,
    "pin": lambda lease: lease.pin("scores", "k"),
    "unpin_all": LocalLease.unpin_all,
    "release": LocalLease.release,
}


@pytest.mark.parametrize("use", USES)
def test_a_lost_lease_disturbs_no_successor(tmp_path: Path, use: str):
    for number in itertools.count(1):
        root = tmp_path / str(number)
        taken: list[LocalLease] = []
        files = InterruptedFiles(lambda root=root, taken=taken: taken.append(successor(root)))
        lease = successor(root, files)
        lease.pin("rollouts", "k")
        start = len(files.trace)
        files.arm(number)
        with suppress(LeaseLost):
            USES[use](lease)
        if not taken:
            assert len(files.trace) - start < number
            break
        (second,) = taken
        second.check()
        assert os.listdir(second.folder / "pins") == []
        assert sorted(os.listdir(second.folder.parent)) == ["000001.ended", "000002"]
        with pytest.raises(LeaseLost):
            lease.check()
    assert number > 1


@pytest.mark.parametrize("meanwhile", ["acquired", "acquired and released", "acquired twice", "taken over"])
@pytest.mark.parametrize("before", ["nothing", "a released one", "a dead one"])
def test_two_acquire_at_once_at_every_operation(tmp_path: Path, before: str, meanwhile: str):
    """While one acquires, at each of its operations another does it all; every number is given once."""
    for number in itertools.count(1):
        root = tmp_path / str(number)
        if before != "nothing":
            first = successor(root)
            if before == "a released one":
                first.release()
        others: list[LocalLease] = []
        slow = somebody()

        def interfere(root: Path = root, others: list[LocalLease] = others, slow: Any = slow) -> None:
            def alive(other: Any) -> bool:
                return other == slow and meanwhile != "taken over"

            for _ in range(2 if meanwhile == "acquired twice" else 1):
                with suppress(LeaseHeld):
                    others.append(acquire_lease(root, "r", files=FaultyFiles(), identity=somebody(), alive=alive))
                    if "released" in meanwhile or (meanwhile == "acquired twice" and len(others) == 1):
                        others[-1].release()

        files = InterruptedFiles(interfere)
        files.arm(number)
        mine: LocalLease | None = None
        with suppress(LeaseHeld):
            mine = acquire_lease(root, "r", files=files, identity=slow, alive=lambda other, others=others: bool(others))
        operations = len(files.trace)
        files.arm(0)
        holding = [lease for lease in (mine, *others) if lease is not None and not lease.lost and holds(lease)]
        assert len(holding) == 1, f"{len(holding)} have the run"
        numbers = [lease.number for lease in (mine, *others) if lease is not None]
        assert len(numbers) == len(set(numbers))
        assert min(numbers) > (0 if before == "nothing" else 1)
        LocalRecords(root, "r", files=FaultyFiles(), lease=holding[0]).commit(0, {})
        folders = os.listdir(root / "runs/r/leases")
        assert [name for name in folders if name.isdigit()] == [f"{holding[0].number:06d}"]
        if operations < number:
            break
    assert number > 20


def test_a_latecomer_with_the_same_number_opens_no_door(tmp_path: Path):
    """It looked before the number was given, and publishes its folder after the holder was taken over."""
    old = successor(tmp_path)
    records = LocalRecords(tmp_path, "r", files=FaultyFiles(), lease=old)
    new = writer(tmp_path)
    (tmp_path / "runs/r/leases/000001").mkdir()
    for name in ("holder.json", "heartbeat"):
        content = (tmp_path / "runs/r/leases/000001.ended" / name).read_bytes()
        (tmp_path / "runs/r/leases/000001" / name).write_bytes(content)
    for change in CHANGES.values():
        with pytest.raises(LeaseLost):
            change(records)
    old.release()
    new.commit(0, {})
    assert successor(tmp_path).number == 3


def test_an_operation_that_had_begun_cannot_end_after_the_takeover(tmp_path: Path):
    """The kernel has found the folders already, and acts on them only now."""
    lease = successor(tmp_path)
    records = LocalRecords(tmp_path, "r", files=FaultyFiles(), lease=lease)
    for iteration in range(3):
        records.commit(iteration, {"lease": 1})
    assert records.supersede(1) == [2]
    iterations = tmp_path / "runs/r/iterations"
    (lease.partial / "written").write_text("record")
    partial, superseded = (os.open(folder, os.O_RDONLY) for folder in (lease.partial, lease.superseded))
    try:
        assert writer(tmp_path).iterations() == [0, 1]
        with pytest.raises(FileNotFoundError):
            os.link("written", iterations / "000002.json", src_dir_fd=partial)
        with pytest.raises(FileNotFoundError):
            os.rename(iterations / "000001.json", "000001.json", dst_dir_fd=superseded)
    finally:
        os.close(partial)
        os.close(superseded)
    assert LocalRecords(tmp_path, "r").iterations() == [0, 1]
    assert os.listdir(tmp_path / "runs/r/leases/000001.ended/superseded") == ["000002.json"]


WRITER = """
import sys, time
from infra.runs.lease import Heartbeat, LeaseLost
from infra.runs.lease_expiry import Clock
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords

root = sys.argv[1]
print("ready", flush=True)
while sys.stdin.readline():
    quick = Clock(sleep=lambda seconds: time.sleep(0.002))
    lease = acquire_lease(root, "r", wait=True, clock=quick, expiry_s=0.03)
    records = LocalRecords(root, "r", lease=lease)
    last = records.last()
    print("holder", lease.number, -1 if last is None else last, len(lease.predecessors), flush=True)
    iteration = 0 if last is None else last + 1
    try:
        with Heartbeat(lease, lambda: None, every_s=0.005):
            while True:
                records.commit(iteration, {"iteration": iteration, "lease": lease.number})
                iteration += 1
    except LeaseLost:
        print("lost", lease.number, iteration, flush=True)
"""


def test_a_stopped_holder_that_goes_on_never_commits(tmp_path: Path):
    """200 times: stopped at a random moment, silent past its lease, taken over, and continued."""
    dice, rounds = random.Random(4), 200
    last_of: dict[int, int] = {}
    with Program(WRITER, str(tmp_path)) as one, Program(WRITER, str(tmp_path)) as other:
        for program in (one, other):
            assert program.hear() == ["ready"]
        old, new = one, other
        old.say("go")
        assert old.hear() == ["holder", "1", "-1", "0"]
        for number in range(1, rounds + 1):
            time.sleep(dice.uniform(0.0, 0.012))
            os.kill(old.process.pid, signal.SIGSTOP)
            os.waitpid(old.process.pid, os.WUNTRACED)
            new.say("go")
            holder, lease, last, taken = new.hear()
            assert (holder, int(lease), int(taken)) == ("holder", number + 1, 1)
            last_of[number] = int(last)
            os.kill(old.process.pid, signal.SIGCONT)
            assert old.hear()[:2] == ["lost", str(number)]
            old, new = new, old
    records = LocalRecords(tmp_path, "r").all()
    assert [record["iteration"] for record in records] == list(range(len(records)))
    for number, last in last_of.items():
        # What the old holder had committed when the new one looked is all that it ever committed.
        assert all((record["lease"] <= number) == (record["iteration"] <= last) for record in records)
    assert len(last_of) == rounds
    assert len({record["lease"] for record in records}) > rounds / 10, "holders were stopped amid their work"
