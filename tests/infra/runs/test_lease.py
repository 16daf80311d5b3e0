"""One writer per run: who gets a lease, who is refused, who is taken over and when. The contract of every store."""

from __future__ import annotations

import json
import threading

import pytest

from infra.process_identity import ProcessIdentity, this_process
from infra.runs.lease import Heartbeat, Lease, LeaseHeld, LeaseLost
from infra.runs.lease_expiry import EXPIRY_S
from tests.infra.places import Place
from tests.infra.runs.leases import StillClock, somebody
from tests.waiting import LONG_S, until


def take(
    place: Place,
    still: StillClock,
    alive: bool | None,
    *,
    wait: bool = False,
    note: dict[str, str] | None = None,
) -> Lease:
    """A lease for a new made-up process; `alive` is what it finds of every other one."""
    return place.acquire(identity=somebody(), alive=lambda _: alive, clock=still.clock, wait=wait, note=note)


def test_a_released_run_can_be_acquired_again_under_a_higher_number(place: Place):
    for number in (1, 2, 3):
        lease = place.acquire()
        assert (lease.run, lease.number, lease.predecessors, lease.lost) == ("r", number, (), False)
        assert place.in_force() == [number]
        lease.check()
        lease.beat()
        lease.pin("scores", "k")
        lease.release()
        lease.release()
        assert lease.lost
        for use in (lease.check, lease.beat, lease.unpin_all, lambda lease=lease: lease.pin("scores", "k")):
            with pytest.raises(LeaseLost, match=f"run r: this process no longer has the run, its lease {number} has"):
                use()
    assert (place.in_force(), place.litter()) == ([], [])


def test_a_dead_holder_is_taken_over_at_once(place: Place):
    still = StillClock()
    take(place, still, True, note={"flow": "abc"})
    before = still.seconds
    second = take(place, still, False)
    assert (second.number, still.seconds) == (2, before)
    assert [(holder.note, holder.since_ms) for holder in second.predecessors] == [({"flow": "abc"}, 1_000_000)]


def test_who_beats_on_a_machine_of_the_same_name_keeps_the_run(place: Place):
    other = this_process().model_copy(update={"boot": "f" * 32, "machine": "e" * 16})
    lease, still = place.acquire(identity=other), StillClock()
    still.while_asleep = lease.beat
    with pytest.raises(LeaseHeld):
        place.acquire(clock=still.clock)
    lease.check()


def test_a_living_one_is_taken_over_only_after_it_was_silent_for_long(place: Place):
    still = StillClock()
    first = take(place, still, True)
    still.seconds += EXPIRY_S - 1
    with pytest.raises(
        LeaseHeld, match=r"process \d+ on here .* has it, last heard of 39 s ago: wait .*\(kill"
    ) as refusal:
        take(place, still, True)
    assert refusal.value.holder.since_ms == 1_000_000
    first.beat()
    still.seconds += EXPIRY_S
    with pytest.raises(LeaseHeld):
        take(place, still, True)
    still.seconds += 0.1
    before = still.seconds
    second = take(place, still, True)
    assert (second.number, len(second.predecessors), still.seconds) == (2, 1, before)
    with pytest.raises(LeaseLost, match=r"its lease 1 was taken over; process \d+ on here \(since .*\) has it now"):
        first.beat()
    first.release()
    second.check()


def test_a_silent_one_elsewhere_is_taken_over_after_the_expiry_and_not_before(place: Place):
    theirs, ours = StillClock(), StillClock()
    take(place, theirs, True, note={"flow": "abc"})
    theirs.seconds += 10**6
    began = ours.seconds
    lease = take(place, ours, None)
    assert EXPIRY_S <= ours.seconds - began <= EXPIRY_S + 1
    assert [holder.note for holder in lease.predecessors] == [{"flow": "abc"}]


def test_a_beating_one_elsewhere_is_refused(place: Place):
    theirs, ours = StillClock(), StillClock()
    first = take(place, theirs, True)
    began = ours.seconds

    def beat_now_and_then() -> None:
        if ours.seconds - began > EXPIRY_S - 1:
            theirs.seconds += 5
            first.beat()

    ours.while_asleep = beat_now_and_then
    with pytest.raises(LeaseHeld, match=r"process \d+ on here .* last heard of just now"):
        take(place, ours, None)
    assert ours.seconds - began < EXPIRY_S
    first.check()


@pytest.mark.parametrize(("alive", "ends"), [(None, "falls silent"), (None, "lets go"), (True, "lets go")])
def test_a_holder_is_waited_for(place: Place, alive: bool | None, ends: str):
    ours = StillClock()
    theirs = ours if alive else StillClock()
    first = take(place, theirs, True)
    began = ours.seconds

    def beat_for_a_while() -> None:
        if ours.seconds - began < 300:
            theirs.seconds += 0 if alive else 0.5
            first.beat()
        elif ends == "lets go":
            first.release()

    ours.while_asleep = beat_for_a_while
    second = take(place, ours, alive, wait=True)
    assert (second.number, len(second.predecessors)) == (2, ends == "falls silent")
    assert -1 <= ours.seconds - began - 300 - (0 if ends == "lets go" else EXPIRY_S) <= 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"clock": "x"}', None])
def test_a_damaged_heartbeat_is_watched(place: Place, damage: bytes | None):
    still = StillClock()
    lease = take(place, still, False)
    place.document("heartbeat").write(damage)
    still.while_asleep = lease.beat
    with pytest.raises(LeaseHeld):
        take(place, still, True)


@pytest.mark.parametrize("leave", ["released", "dead"])
def test_one_of_many_gets_the_lease(place: Place, leave: str):
    rounds, contenders = 60, 8
    start, stop = threading.Barrier(contenders), threading.Barrier(contenders)
    won: list[tuple[int, int, int]] = []
    refused: list[LeaseHeld] = []
    gone: set[ProcessIdentity] = set()

    def contend() -> None:
        for turn in range(rounds):
            me, lease = somebody(), None
            start.wait(timeout=LONG_S)
            try:
                lease = place.acquire(identity=me, alive=lambda other: other not in gone)
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
    place.clear_up()
    assert place.litter() == []


def test_the_heartbeat_beats_and_says_when_the_lease_is_lost(place: Place):
    lease, lost = place.acquire(), threading.Event()
    calls: list[str] = []

    def on_lost() -> None:
        calls.append(threading.current_thread().name)
        lost.set()

    with Heartbeat(lease, on_lost, every_s=0.005):
        until(lambda: beats(place) >= 5, "five beats")
        assert calls == []
        place.successor()
        assert lost.wait(timeout=LONG_S)
    assert lease.lost
    assert calls == ["heartbeat-r"]


def test_a_beat_that_fails_is_tried_again(place: Place):
    seam, calls = place.seam(), list[int]()
    lease = place.acquire(seam=seam)
    with Heartbeat(lease, lambda: calls.append(1), every_s=0.005):
        for _ in range(3):
            before = seam.arm(1)
            until(lambda before=before: len(seam.trace) > before, "a beat that fails")
        now = beats(place)
        until(lambda: beats(place) > now, "a beat")
    assert (calls, lease.lost, place.litter()) == ([], False, [])


def test_pins_last_until_they_are_let_go(place: Place):
    lease = place.acquire()
    for kind, key in (("scores", "a-b_1"), ("scores", "a-b_1"), ("rollouts", "c")):
        lease.pin(kind, key)
    assert place.collector().pinned() == {("scores", "a-b_1"), ("rollouts", "c")}
    for _ in range(2):
        lease.unpin_all()
        assert place.collector().pinned() == set()


def beats(place: Place) -> int:
    """The number of the last beat."""
    leases = place.leases()
    return int(json.loads(leases.heartbeat(leases.live()[-1]) or b'{"beat": 0}')["beat"])
