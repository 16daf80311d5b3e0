"""Two writers of one run, a collector and crashes on a bucket in memory, as a Hypothesis state machine.

A step lets one process make some calls; so each is stopped between any two, for as long as the others take, and one
that held the run may find it taken over when it goes on. After every step the whole bucket is looked at.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import uuid4

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from infra.artifacts.s3_envelope import Envelope, envelope_key, move, read_version, upload_prefix
from infra.process_identity import ProcessIdentity
from infra.runs.lease import LeaseHeld, LeaseLost
from infra.runs.lease_expiry import EXPIRY_S
from infra.runs.s3_lease import S3Lease, acquire_lease
from infra.runs.s3_records import S3Records
from infra.storage.objects import Objects
from tests.infra.runs.bucket_runs import ADDRESS, ROOT, Name, collector_on, look, records_of
from tests.infra.runs.leases import StillClock, somebody
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects

T = TypeVar("T")
PLANS = st.lists(
    st.sampled_from(("commit", "commit", "commit", "roll back", "beat", "release")), min_size=1, max_size=4
)
SLOTS = ("first", "second", "collector")
CLOCK = "clock"
TURNS = st.tuples(st.sampled_from((*SLOTS, CLOCK)), st.sampled_from((1, 2, 3, 5, 10, 30, 200)), PLANS)


class Process(FaultyObjects):
    """A process whose work goes on only while `step` lets it; it works in a thread, but never beside its caller."""

    def __init__(self, objects: MemoryObjects, action: Callable[[Process], None]) -> None:
        super().__init__(objects)
        self.identity = somebody()
        self.lease: S3Lease | None = None
        self.using: set[Name] = set()
        self.done = False
        self._left = 0
        self._turn, self._handed_back = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, args=(action,), daemon=True).start()

    def step(self, calls: int) -> bool:
        """Make at most this many calls; whether all is done."""
        self._left = calls
        self._turn.release()
        self._handed_back.acquire()
        if self._failure is not None and not isinstance(self._failure, Died):
            raise self._failure
        return self.done

    def die(self) -> None:
        """End at once."""
        self._dead = True
        if not self.done:
            self.step(1)

    def _do(self, name: str, key: str, action: Callable[[], T]) -> T:
        if self._left <= 0 and not self._dead:
            self._handed_back.release()
            self._turn.acquire()
        self._left -= 1
        return super()._do(name, key, action)

    def _run(self, action: Callable[[Process], None]) -> None:
        self._turn.acquire()
        try:
            action(self)
        except BaseException as error:
            self._failure = error
        self.done = True
        self._handed_back.release()


def names_of(iteration: int) -> list[Name]:
    """What an iteration makes: something of its own, and something that it shares with every second one."""
    return [("rollouts", f"k{iteration % 2}"), ("checkpoint", f"k{iteration}")]


def find_or_make(objects: Objects, name: Name) -> None:
    """As a store does: what is condemned is saved, and what is gone is made again."""
    upload = uuid4().hex
    while True:
        version = read_version(objects, ADDRESS, *name)
        if version is not None and version.exists:
            if version.envelope.state == "live" or move(objects, ADDRESS, *name, version, "live") is not None:
                return
            continue
        objects.write(upload_prefix(ADDRESS, *name, upload) + "data.bin", b"12345")
        content = Envelope.of("live", upload, {}).to_bytes()
        if version is None:
            objects.create(envelope_key(ADDRESS, *name), content)
        else:
            objects.replace(envelope_key(ADDRESS, *name), content, version.etag)


class BucketMachine(RuleBasedStateMachine):
    """The switch is there to be turned off: then the machine must find what goes wrong."""

    pins_first = True

    def __init__(self) -> None:
        super().__init__()
        self.objects = MemoryObjects()
        self.clock = StillClock()
        self.processes: dict[str, Process] = {}
        self.alive: set[ProcessIdentity] = set()
        self.versions = itertools.count()
        self.given: list[int] = []
        self.seen: set[int] = set()
        self.must_stay: dict[int, dict[str, Any]] = {}
        self.must_not_return: set[int] = set()

    @initialize()
    def start_with_records(self) -> None:
        """A run with two records, whose writer has died after it had made what comes next."""
        self._begin("first", ["commit", "commit"])
        while not self.processes["first"].step(100):
            continue
        self._end("first")
        for iteration in (2, 3):
            find_or_make(self.objects, names_of(iteration)[1])
        self.everything_is_as_it_must_be()

    @rule(schedule=st.lists(TURNS, min_size=10, max_size=40))
    def go_on(self, schedule: list[tuple[str, int, list[str]]]) -> None:
        """One after the other makes some calls, new processes start, time passes; all is looked at after each."""
        for slot, calls, plan in schedule:
            if slot == CLOCK:
                self.clock.seconds += EXPIRY_S + 1
                continue
            if slot not in self.processes:
                self._begin(slot, plan)
            if self.processes[slot].step(calls):
                self._end(slot)
            self.everything_is_as_it_must_be()

    @precondition(lambda self: self.processes)
    @rule(slot=st.sampled_from(SLOTS))
    def crash(self, slot: str) -> None:
        if slot in self.processes:
            self._end(slot)

    def everything_is_as_it_must_be(self) -> None:
        """For whoever looks from outside."""
        records = records_of(self.objects)
        found = dict(zip(records.iterations(), records.all(), strict=True))
        assert list(found) == list(range(len(found))), "a gap"
        for iteration, record in self.must_stay.items():
            assert found.get(iteration) == record, f"record {iteration} was committed"
        assert self.must_not_return.isdisjoint(record["version"] for record in found.values())
        new = [record for record in found.values() if record["version"] not in self.seen]
        assert all(record["lease"] == max(self.given) for record in new), "written by one who no longer has the run"
        self.seen |= {record["version"] for record in new}
        named = {(kind, key) for record in found.values() for kind, key in record["names"]}
        holders = [one for one in self.processes.values() if one.lease is not None and self._has_the_run(one.lease)]
        used = {name for one in holders for name in one.using}
        for name in sorted(named | used | {name for n in range(5) for name in names_of(n)}):
            content = look(self.objects, name)
            assert content in (None, b"12345"), f"{name} is half there"
            assert content is not None or name not in named, f"{name} is named by a record"
            assert content is not None or name not in used, f"{name} is in use"

    def teardown(self) -> None:
        for slot in list(self.processes):
            self._end(slot)

    def _begin(self, slot: str, plan: list[str]) -> None:
        action = self._collect if slot == "collector" else (lambda process: self._write(process, plan))
        self.processes[slot] = Process(self.objects, action)
        self.alive.add(self.processes[slot].identity)

    def _end(self, slot: str) -> None:
        process = self.processes.pop(slot)
        process.die()
        self.alive.discard(process.identity)

    def _has_the_run(self, lease: S3Lease) -> bool:
        head = lease.head.place("head.json").removeprefix("s3://memory/")
        return f'"token": "{lease._tenure.token}"'.encode() in self.objects.content[head] and not lease.lost

    def _write(self, process: Process, plan: list[str]) -> None:
        try:
            process.lease = lease = acquire_lease(
                ROOT,
                "r",
                objects=process,
                identity=process.identity,
                alive=lambda identity: identity in self.alive,
                clock=self.clock.clock,
            )
        except LeaseHeld:
            return
        assert lease.number not in self.given, "a lease's number was given twice"
        self.given.append(lease.number)
        records = records_of(process, lease=lease)
        doings: dict[str, Callable[[], None]] = {
            "commit": lambda: self._commit(process, lease, records),
            "roll back": lambda: self._roll_back(lease, records),
            "beat": lease.beat,
            "release": lease.release,
        }
        try:
            for doing in plan:
                doings[doing]()
        except LeaseLost:
            process.using.clear()

    def _commit(self, process: Process, lease: S3Lease, records: S3Records) -> None:
        last = records.last()
        iteration = 0 if last is None else last + 1
        for name in names_of(iteration):
            if self.pins_first:
                lease.pin(*name)
            find_or_make(process, name)
            if not self.pins_first:
                lease.pin(*name)
            process.using.add(name)
        told = {
            "names": [list(name) for name in names_of(iteration)],
            "lease": lease.number,
            "version": next(self.versions),
        }
        records.commit(iteration, told)
        self.must_stay[iteration] = told
        process.using.clear()
        lease.unpin_all()

    def _roll_back(self, lease: S3Lease, records: S3Records) -> None:
        last = records.last()
        after = max(-1, (0 if last is None else last) - 2)
        lease.check()
        out = [record["version"] for iteration, record in self.must_stay.items() if iteration > after]
        for iteration in [iteration for iteration in self.must_stay if iteration > after]:
            del self.must_stay[iteration]
        records.supersede(after)
        self.must_not_return |= set(out)

    def _collect(self, process: Process) -> None:
        records = records_of(process)
        collector = collector_on(process)
        wanted = [(stored.kind, stored.key) for stored in collector.artifacts()]
        collector.collect(wanted, lambda: {(k, key) for record in records.all() for k, key in record["names"]})
        collector.remove(collector.leftovers())
