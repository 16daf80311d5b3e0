"""Leases in a folder: what lies there, and real processes that hold a run, die, and take turns."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from infra.runs.lease import LeaseHeld
from infra.runs.lease_expiry import EXPIRY_S, Clock
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords
from tests.infra.programs import Program
from tests.infra.runs.leases import StillClock, somebody
from tests.infra.storage.faulty_files import FaultyFiles

HOLDER = """
import sys
from infra.runs.local_lease import acquire_lease
acquire_lease(sys.argv[1], "r", note={"flow": "abc"})
print("holding", flush=True)
input()
"""


def test_a_dead_holder_here_is_taken_over_at_once(tmp_path: Path):
    with Program(HOLDER, str(tmp_path)) as holder:
        assert holder.hear() == ["holding"]
        pid = holder.process.pid
        with pytest.raises(
            LeaseHeld, match=rf"process {pid} on .* has it, last heard of \d+ s ago: wait .*\(kill {pid}\)"
        ):
            acquire_lease(tmp_path, "r")
        began = time.monotonic()
        holder.process.kill()
        # Nobody has collected it yet: for the kernel it is a zombie, for us it is dead.
        lease = acquire_lease(tmp_path, "r", wait=True)
        assert time.monotonic() - began < EXPIRY_S
    (predecessor,) = lease.predecessors
    assert (predecessor.identity.pid, predecessor.note) == (pid, {"flow": "abc"})
    assert abs(predecessor.since_ms / 1000 - time.time()) < 60
    assert (lease.number, sorted(os.listdir(lease.folder.parent))) == (2, ["000001.ended", "000002"])


def test_a_damaged_holder_is_watched_and_blocks_nobody(tmp_path: Path):
    still = StillClock()
    for damage in (b"", b"{}", b"[1]", None):
        lease = acquire_lease(
            tmp_path, "r", files=FaultyFiles(), identity=somebody(), alive=lambda _: True, clock=still.clock
        )
        path = lease.folder / "holder.json"
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        before = still.seconds
        acquire_lease(tmp_path, "r", files=FaultyFiles(), clock=still.clock).release()
        assert EXPIRY_S <= still.seconds - before <= EXPIRY_S + 1


def test_what_lies_there(tmp_path: Path):
    files = FaultyFiles()
    for number in (1, 2):
        lease = acquire_lease(tmp_path, "r", files=files)
        assert lease.folder == tmp_path / f"runs/r/leases/{number:06d}"
        lease.beat()
        assert (sorted(os.listdir(lease.folder)), os.listdir(lease.partial)) == (
            ["heartbeat", "holder.json", "partial", "pins", "superseded"],
            [],
        )
        lease.pin("scores", "a-b_1")
        lease.pin("rollouts", "c")
        assert sorted(os.listdir(lease.folder / "pins")) == ["rollouts.c", "scores.a-b_1"]
        lease.release()
    assert sorted(os.listdir(tmp_path / "runs/r/leases")) == ["000001.ended", "000002.ended"]
    # The collector looks at pins under the same lock.
    assert [one.path for one in files.trace if one.name == "exclusive"] == [tmp_path / ".gc.lock"] * 4


def test_a_beat_that_fails_leaves_nothing(tmp_path: Path):
    files = FaultyFiles(0, "ENOSPC once")
    lease = acquire_lease(tmp_path, "r", files=files)
    for number in itertools.count(1):
        start = files.arm(number)
        with suppress(OSError):
            lease.beat()
        assert os.listdir(lease.partial) == []
        if len(files.trace) - start < number:
            assert number > 2  # else nothing was interrupted
            break


APPENDER = """
import sys, time
from infra.runs.lease_expiry import Clock
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords

print("ready", flush=True)
input()
for _ in range(50):
    lease = acquire_lease(sys.argv[1], "r", wait=True, clock=Clock(sleep=lambda seconds: time.sleep(0.001)))
    records = LocalRecords(sys.argv[1], "r", lease=lease)
    last = records.last()
    records.commit(0 if last is None else last + 1, {"lease": lease.number})
    lease.release()
print("done", flush=True)
"""


def test_two_processes_take_turns(tmp_path: Path):
    with Program(APPENDER, str(tmp_path)) as one, Program(APPENDER, str(tmp_path)) as other:
        for program in (one, other):
            assert program.hear() == ["ready"]
        for program in (one, other):
            program.say("go")
        assert [program.hear() for program in (one, other)] == [["done"], ["done"]]
    records = LocalRecords(tmp_path, "r")
    assert [record["lease"] for record in records.all()] == list(range(1, 101))


def test_the_real_clock_goes_forward():
    clock = Clock()
    assert clock.boot() >= time.monotonic() - 1
    assert abs(clock.now_ms() / 1000 - time.time()) < 5
