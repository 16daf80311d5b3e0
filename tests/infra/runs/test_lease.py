"""One writer per run: who gets a lease, who is refused, who is taken over and when."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.process_identity import ProcessIdentity
from infra.runs.lease import LeaseHeld, LeaseLost
from infra.runs.lease_expiry import EXPIRY_S, Clock
from infra.runs.local_lease import LocalLease, acquire_lease
from infra.runs.local_records import LocalRecords
from tests.infra.programs import Program
from tests.infra.runs.leases import StillClock, somebody
from tests.infra.storage.faulty_files import FaultyFiles
from tests.waiting import LONG_S

HOLDER = """
import sys
from infra.runs.local_lease import acquire_lease
acquire_lease(sys.argv[1], "r", note={"flow": "abc"})
print("holding", flush=True)
input()
"""


def take(
    root: Path,
    still: StillClock,
    alive: Callable[[ProcessIdentity], bool | None],
    *,
    wait: bool = False,
    note: dict[str, str] | None = None,
) -> LocalLease:
    """A lease for a new made-up process."""
    return acquire_lease(
        root, "r", note=note, wait=wait, files=FaultyFiles(), identity=somebody(), alive=alive, clock=still.clock
    )


def lives(_: ProcessIdentity) -> bool:
    return True


def is_dead(_: ProcessIdentity) -> bool:
    return False


def is_elsewhere(_: ProcessIdentity) -> None:
    return None


def test_a_released_run_can_be_acquired_again_under_a_higher_number(tmp_path: Path):
    for number in (1, 2, 3):
        lease = acquire_lease(tmp_path, "r")
        assert (lease.run, lease.number, lease.predecessors, lease.lost) == ("r", number, (), False)
        assert lease.folder == tmp_path / f"runs/r/leases/{number:06d}"
        lease.check()
        lease.beat()
        lease.release()
        lease.release()
        assert lease.lost
        for use in (lease.check, lease.beat, lease.unpin_all, lambda lease=lease: lease.pin("scores", "k")):
            with pytest.raises(LeaseLost, match=f"run r: this process no longer has the run, its lease {number} has"):
                use()
    assert sorted(os.listdir(tmp_path / "runs/r/leases")) == [f"{number:06d}.ended" for number in (1, 2, 3)]


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


def test_a_living_one_is_taken_over_only_after_it_was_silent_for_long(tmp_path: Path):
    still = StillClock()
    first = take(tmp_path, still, lives)
    still.seconds += EXPIRY_S - 1
    with pytest.raises(LeaseHeld, match="last heard of 39 s ago") as refusal:
        take(tmp_path, still, lives)
    assert refusal.value.holder.since_ms == 1_000_000
    first.beat()
    still.seconds += EXPIRY_S
    with pytest.raises(LeaseHeld):
        take(tmp_path, still, lives)
    still.seconds += 0.1
    before = still.seconds
    second = take(tmp_path, still, lives)
    assert (second.number, len(second.predecessors), still.seconds) == (2, 1, before)
    with pytest.raises(LeaseLost, match=r"its lease 1 was taken over; process \d+ on here \(since .*\) has it now"):
        first.beat()
    first.release()
    second.check()


def test_a_silent_one_elsewhere_is_taken_over_after_the_expiry_and_not_before(tmp_path: Path):
    theirs, ours = StillClock(), StillClock()
    take(tmp_path, theirs, lives, note={"flow": "abc"})
    theirs.seconds += 10**6
    began = ours.seconds
    lease = take(tmp_path, ours, is_elsewhere)
    assert EXPIRY_S <= ours.seconds - began <= EXPIRY_S + 1
    assert [holder.note for holder in lease.predecessors] == [{"flow": "abc"}]


def test_a_beating_one_elsewhere_is_refused(tmp_path: Path):
    theirs, ours = StillClock(), StillClock()
    first = take(tmp_path, theirs, lives)
    began = ours.seconds

    def beat_now_and_then() -> None:
        if ours.seconds - began > EXPIRY_S - 1:
            theirs.seconds += 5
            first.beat()

    ours.while_asleep = beat_now_and_then
    with pytest.raises(LeaseHeld, match=r"process \d+ on here .* last heard of just now"):
        take(tmp_path, ours, is_elsewhere)
    assert ours.seconds - began < EXPIRY_S
    first.check()


def test_one_elsewhere_that_stops_beating_is_waited_for(tmp_path: Path):
    theirs, ours = StillClock(), StillClock()
    first = take(tmp_path, theirs, lives)
    began = ours.seconds

    def beat_for_a_while() -> None:
        if ours.seconds - began < 300:
            theirs.seconds += 0.5
            first.beat()

    ours.while_asleep = beat_for_a_while
    assert take(tmp_path, ours, is_elsewhere, wait=True).number == 2
    assert 299 + EXPIRY_S <= ours.seconds - began <= 301 + EXPIRY_S


def test_waiting_ends_when_the_holder_lets_go(tmp_path: Path):
    still = StillClock()
    first = take(tmp_path, still, lives)
    began = still.seconds

    def go_on_for_minutes() -> None:
        first.beat() if still.seconds - began < 300 else first.release()

    still.while_asleep = go_on_for_minutes
    second = take(tmp_path, still, lives, wait=True)
    assert (second.number, second.predecessors) == (2, ())
    assert still.seconds - began == 300


def test_a_damaged_holder_is_watched_and_blocks_nobody(tmp_path: Path):
    still = StillClock()
    for damage in (b"", b"{}", b"[1]", None):
        lease = take(tmp_path, still, lives)
        path = lease.folder / "holder.json"
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        before = still.seconds
        acquire_lease(tmp_path, "r", files=FaultyFiles(), clock=still.clock).release()
        assert EXPIRY_S <= still.seconds - before <= EXPIRY_S + 1


def test_a_damaged_heartbeat_is_watched(tmp_path: Path):
    still = StillClock()
    for damage in (b"", b"{}", b"[1]", b'{"clock": "x"}', None):
        lease = take(tmp_path, still, is_dead)
        (lease.folder / "heartbeat").unlink()
        if damage is not None:
            (lease.folder / "heartbeat").write_bytes(damage)
        still.while_asleep = lease.beat
        with pytest.raises(LeaseHeld):
            take(tmp_path, still, lives)


@pytest.mark.parametrize("leave", ["released", "dead"])
def test_one_of_many_gets_the_lease(tmp_path: Path, leave: str):
    rounds, contenders = 60, 4
    start, stop = threading.Barrier(contenders), threading.Barrier(contenders)
    won: list[tuple[int, int, int]] = []
    refused: list[LeaseHeld] = []
    gone: set[ProcessIdentity] = set()

    def contend() -> None:
        for turn in range(rounds):
            me = somebody()
            start.wait(timeout=LONG_S)
            lease = None
            try:
                lease = acquire_lease(
                    tmp_path, "r", files=FaultyFiles(), identity=me, alive=lambda other: other not in gone
                )
                won.append((turn, lease.number, len(lease.predecessors)))
            except LeaseHeld as refusal:
                refused.append(refusal)
            stop.wait(timeout=LONG_S)
            if lease is not None:
                lease.release() if leave == "released" else gone.add(me)

    threads = [threading.Thread(target=contend) for _ in range(contenders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LONG_S)
    assert [turn for turn, _, _ in won] == list(range(rounds))
    assert [number for _, number, _ in won] == list(range(1, rounds + 1))
    assert all(taken == (leave == "dead" and turn > 0) for turn, _, taken in won)
    assert len(refused) == rounds * (contenders - 1)
    assert not [name for name in os.listdir(tmp_path / "runs/r/leases") if not re.fullmatch(r"\d{6}(\.ended)?", name)]


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
