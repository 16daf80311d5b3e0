"""Two writers of one run, a collector, crashes and power cuts on a store, as a Hypothesis state machine.

A step lets one process make some calls; so each is stopped between any two, for as long as the others take, and one
that held the run may find it taken over when it goes on. After every step the whole store is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infra.artifacts import ArtifactError
from infra.process_identity import ProcessIdentity
from infra.runs.lease import Lease, LeaseHeld, LeaseLost
from infra.runs.lease_expiry import EXPIRY_S
from infra.runs.records import RunRecords
from tests.infra.busy_places import BusyBucket, BusyPlace, Disk, Name, Process
from tests.infra.runs.leases import StillClock, somebody

PLANS = st.lists(
    st.sampled_from(("commit", "commit", "commit", "roll back", "beat", "release")), min_size=1, max_size=4
)
WRITERS = ("first", "second")
SLOTS = (*WRITERS, "collector")
CLOCK = "clock"
TURNS = st.tuples(st.sampled_from((*SLOTS, CLOCK)), st.sampled_from((1, 2, 3, 5, 15, 40, 120, 1000)), PLANS)


def names_of(iteration: int) -> list[Name]:
    """What an iteration makes: something of its own, and something that it shares with every second one."""
    return [("rollouts", f"k{iteration % 2}"), ("checkpoint", f"k{iteration}")]


class Actor:
    """A process: what it does, and what it has in hand."""

    def __init__(self, process: Process, identity: ProcessIdentity) -> None:
        self.process = process
        self.identity = identity
        self.lease: Lease | None = None
        self.using: set[Name] = set()


class StoreMachine(RuleBasedStateMachine):
    """The switches are there to be turned off: then the machine must find what goes wrong."""

    pins_first = True
    keeps_pins = True
    new_place: Callable[[], BusyPlace]

    def __init__(self) -> None:
        super().__init__()
        self.place = type(self).new_place()
        self.clock = StillClock()
        self.actors: dict[str, Actor] = {}
        self.alive: set[ProcessIdentity] = set()
        self.versions = itertools.count()
        self.given: set[int] = set()
        self.seen: set[int] = set()
        self.known: dict[int, dict[str, Any]] = {}
        self.must_stay: dict[int, dict[str, Any]] = {}
        self.must_not_return: set[int] = set()
        self.acting: int | None = None

    @initialize()
    def start_with_records(self) -> None:
        """A run with two records, whose writer has died after it had made what comes next."""
        actor = self._new_actor("first")
        self._write(actor, ["commit", "commit"])
        for iteration in (2, 3):
            self.place.put(names_of(iteration)[1])
        self._end("first")

    @rule(schedule=st.lists(TURNS, min_size=10, max_size=40))
    def go_on(self, schedule: list[tuple[str, int, list[str]]]) -> None:
        """One after the other makes some calls, new processes start, time passes; all is looked at after each."""
        for slot, calls, plan in schedule:
            if slot == CLOCK:
                # Who holds the run and has not beaten is now taken for gone.
                self.clock.seconds += EXPIRY_S + 1
                continue
            if slot not in self.actors:
                self._begin(slot, plan)
            self._step(slot, calls)
            self.everything_is_as_it_must_be()

    @precondition(lambda self: self.actors)
    @rule(slot=st.sampled_from(SLOTS))
    def crash(self, slot: str) -> None:
        if slot in self.actors:
            self._end(slot)

    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        if not self._has_changed():
            self.acting = None
            return
        records = self.place.records()
        found = dict(zip(records.iterations(), records.all(), strict=True))
        self._records_are_right(found)
        self._only_the_holder_changed(found)
        self.known = found
        self._artifacts_are_right({(kind, key) for record in found.values() for kind, key in record["names"]})

    def teardown(self) -> None:
        for slot in list(self.actors):
            self._end(slot)

    def _has_changed(self) -> bool:
        return True

    def _records_are_right(self, found: dict[int, dict[str, Any]]) -> None:
        assert list(found) == list(range(len(found))), "a gap"
        for iteration, record in self.must_stay.items():
            assert found.get(iteration) == record, f"record {iteration} was committed"
        assert self.must_not_return.isdisjoint(record["version"] for record in found.values())

    def _artifacts_are_right(self, named: set[Name]) -> None:
        stored = self.place.collector().artifacts()
        leases = [(actor, actor.lease) for actor in self.actors.values() if actor.lease is not None]
        used = {name for actor, lease in leases if self.place.has_the_run(lease) for name in actor.using}
        for name in sorted({(one.kind, one.key) for one in stored} | named | used):
            found = self.place.look(name)
            assert found in (None, True), f"{name} is half there"
            assert found or name not in named, f"{name} is named by a record"
            assert found or name not in used, f"{name} is in use"

    def _step(self, slot: str, calls: int) -> None:
        actor = self.actors[slot]
        before = None if actor.lease is None else actor.lease.number
        ended = actor.process.step(calls)
        self.acting = before if before is not None or actor.lease is None else actor.lease.number
        if ended:
            self._end(slot)

    def _only_the_holder_changed(self, found: dict[int, dict[str, Any]]) -> None:
        newest = max(self.given)  # all other leases have ended
        new = [record for record in found.values() if record["version"] not in self.seen]
        assert all(record["lease"] == newest for record in new), "written by one who no longer has the run"
        self.seen |= {record["version"] for record in new}
        gone = {record["version"] for record in self.known.values()} - {record["version"] for record in found.values()}
        # What the last writer could not make durable before the power went may be gone, or not be gone.
        assert not gone or self.acting in (None, newest), "taken out by one who no longer has the run"
        self.acting = None

    def _begin(self, slot: str, plan: list[str]) -> None:
        actor = self._new_actor(slot)
        if slot in WRITERS:
            actor.process.begin("write", lambda: self._write(actor, plan))
        else:
            actor.process.begin("collect", lambda: self._collect(actor))

    def _new_actor(self, slot: str) -> Actor:
        actor = Actor(self.place.process(), somebody())
        self.actors[slot] = actor
        self.alive.add(actor.identity)
        return actor

    def _end(self, slot: str) -> None:
        actor = self.actors.pop(slot)
        actor.process.die()
        self.alive.discard(actor.identity)

    def _is_alive(self, identity: ProcessIdentity) -> bool:
        return identity in self.alive

    def _write(self, actor: Actor, plan: list[str]) -> None:
        try:
            actor.lease = lease = self.place.acquire(
                seam=actor.process, identity=actor.identity, alive=self._is_alive, clock=self.clock.clock
            )
        except LeaseHeld:
            return
        assert lease.number not in self.given, "a lease's number was given twice"
        self.given.add(lease.number)
        records = self.place.records(lease=lease, seam=actor.process)
        doings: dict[str, Callable[[], None]] = {
            "commit": lambda: self._commit(actor, lease, records),
            "roll back": lambda: self._roll_back(lease, records),
            "beat": lease.beat,
            "release": lease.release,
        }
        try:
            for doing in plan:
                doings[doing]()
        except (LeaseLost, OSError, ArtifactError):
            # Without the run a process has no pins either; so what it uses can go.
            if self.place.has_the_run(lease):
                raise

    def _commit(self, actor: Actor, lease: Lease, records: RunRecords) -> None:
        last = records.last()
        iteration = 0 if last is None else last + 1
        for name in names_of(iteration):
            if self.pins_first:
                lease.pin(*name)
            self.place.find_or_put(name, actor.process, actor.identity)
            if not self.pins_first:
                lease.pin(*name)
            actor.using.add(name)
            if not self.keeps_pins:
                actor.using.clear()
                lease.unpin_all()
        record = {
            "names": [list(name) for name in names_of(iteration)],
            "lease": lease.number,
            "version": next(self.versions),
        }
        records.commit(iteration, record)
        # Whoever lost the run before this returned has committed, and the next holder may have rolled that back.
        if self.place.has_the_run(lease):
            self.must_stay[iteration] = record
        actor.using.clear()
        lease.unpin_all()

    def _roll_back(self, lease: Lease, records: RunRecords) -> None:
        after = max(-1, (records.last() or 0) - 2)
        out = {iteration: record["version"] for iteration, record in self.known.items() if iteration > after}
        lease.check()
        for iteration in [iteration for iteration in self.must_stay if iteration > after]:
            del self.must_stay[iteration]
        records.supersede(after)
        self.must_not_return |= set(out.values())

    def _collect(self, actor: Actor) -> None:
        records = self.place.records(seam=actor.process)
        collector = self.place.collector(actor.process, identity=actor.identity, alive=self._is_alive)
        wanted = [(stored.kind, stored.key) for stored in collector.artifacts()]
        collector.collect(wanted, lambda: {(kind, key) for record in records.all() for kind, key in record["names"]})
        collector.remove(collector.orphans())


class DiskMachine(StoreMachine):
    """On a disk, where the power can be cut."""

    new_place = Disk

    def __init__(self) -> None:
        super().__init__()
        self.seen_at = 0

    @rule(seed=st.integers(0, 2**32))
    def cut_the_power(self, seed: int) -> None:
        for slot in list(self.actors):
            self._end(slot)
        self.place = Disk(self.place.disk.after_power_cut(seed))

    def _has_changed(self) -> bool:
        before, self.seen_at = self.seen_at, self.place.disk.now_ns
        return before != self.seen_at


class BucketMachine(StoreMachine):
    """In a bucket."""

    new_place = BusyBucket
