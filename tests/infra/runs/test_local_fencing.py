"""What keeps a stopped holder out of a folder: no name and no open folder leads it back into its lease."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from infra.runs.lease import LeaseLost
from infra.runs.local_records import LocalRecords
from tests.infra.programs import Program
from tests.infra.runs.leases import successor, writer
from tests.infra.runs.test_fencing import CHANGES
from tests.infra.storage.faulty_files import FaultyFiles


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


@pytest.mark.thorough
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
