"""The lease of a run on S3.

Every change of a run is one compare-and-swap of its head, and a takeover changes the head: so a holder that was stopped
and goes on after another process has taken the run over loses its next swap, sees why, and gets LeaseLost.

What a holder writes besides (`heartbeat.json` and the pins) lies in a folder that no other attempt at a lease shares.
It counts as long as the head names that folder: pins of a lease that has ended keep nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from uuid import uuid4

from infra.process_identity import ProcessIdentity, is_alive, this_process
from infra.runs.lease_expiry import EXPIRY_S, POLL_S, Clock, LeaseExpiry, beat_of
from infra.runs.names import validate_run_name
from infra.runs.owner import LeaseLost, LeaseOwner, loss
from infra.runs.s3_pointer import LeaseState, RunHead, RunPointer, Step, Version
from infra.storage.client import open_objects
from infra.storage.conditions import require_conditional_puts
from infra.storage.objects import Objects, S3Address, StoreUnavailable
from infra.storage.outage import at_once

HEARTBEAT = "heartbeat.json"
PINS = "pins"
TRIAL = "trial"


class S3Lease:
    """The lease of a run on S3; see `infra.runs.lease.Lease`.

    `pin` does not look whether the lease is gone: what it would keep is of no use to one that has lost the run.
    """

    def __init__(self, head: RunHead, state: LeaseState, clock: Clock) -> None:
        self.head = head
        self.run = head.run
        self.number = state.number
        self.predecessors: tuple[LeaseOwner, ...] = ()
        self._state = state
        self._clock = clock
        self._beats = 0
        self._pinned: dict[str, bool] = {}
        self._mutex = threading.Lock()
        self._lost = False

    @property
    def lost(self) -> bool:
        """Whether this process has noticed that the run is no longer its own, or has released it."""
        return self._lost

    def change(self, step: Step) -> RunPointer:
        """Change the head of the run, or LeaseLost."""

        def fenced(head: RunPointer) -> RunPointer:
            self._fence(head)
            return step(head)

        return self.head.change(fenced)

    def check(self) -> None:
        """LeaseLost if the lease is gone."""
        self._fence(self.head.look().head)

    def beat(self) -> None:
        """Show that the holder lives, or LeaseLost."""
        with at_once():  # the next beat comes soon
            self.check()
            self._beats += 1
            self.head.objects.write(self._key(HEARTBEAT), beat_of(self._beats, self._clock))

    def pin(self, kind: str, key: str) -> None:
        """Keep the collector from an artifact; one that is pinned already costs nothing."""
        if self._lost:
            raise loss(self.run, self.number, None)
        name = f"{PINS}/{kind}.{key}"
        with self._mutex:
            if self._pinned.get(name):
                return
            # Also one whose writing failed may be there.
            self._pinned[name] = False
        self.head.objects.write(self._key(name), b"")
        with self._mutex:
            self._pinned[name] = True

    def unpin_all(self) -> None:
        """Let go of every pinned artifact."""
        if self._lost:
            raise loss(self.run, self.number, None)
        with self._mutex:
            names = list(self._pinned)
        if names:
            self.head.objects.remove([self._key(name) for name in names])
        with self._mutex:
            for name in names:
                self._pinned.pop(name, None)

    def release(self) -> None:
        """Let the run go; nothing happens where it is gone already."""
        if self._lost:
            return
        with suppress(LeaseLost), at_once():
            self.change(ended)
        self._lost = True
        # What is left of a lease that has ended says nothing, and a collector removes it.
        with suppress(StoreUnavailable), at_once():
            self.head.objects.remove([self._key(HEARTBEAT), *(self._key(name) for name in self._pinned)])

    def begin(self, before: Version) -> bool:
        """Become the holder after this version of the head; False if another process was faster.

        StoreRefused where the server would let several have the run.
        """
        require_conditional_puts(self.head.objects, self._key(TRIAL))
        self.head.objects.write(self._key(HEARTBEAT), beat_of(0, self._clock))
        try:
            begun = self.head.put(before.head.changed(lease=self._state), before)
        except StoreUnavailable:
            with suppress(StoreUnavailable, LeaseLost), at_once():
                self.change(ended)
            raise
        if begun is not None:
            return True
        with suppress(StoreUnavailable), at_once():
            self.head.objects.remove([self._key(HEARTBEAT)])
        return False

    def _fence(self, head: RunPointer) -> None:
        if self._lost or head.lease.token != self._state.token or head.lease.holder is None:
            self._lost = True
            other = head.lease.token != self._state.token
            raise loss(self.run, self.number, head.lease.holder if other else None)

    def _key(self, name: str) -> str:
        return self.head.key(f"{self._state.folder}/{name}")


class LeaseStates:
    """What a watch looks at: the lease that a head names."""

    def __init__(self, head: RunHead) -> None:
        self.run = head.run
        self._head = head
        self._present = LeaseState()

    def live(self) -> tuple[int, ...]:
        """The numbers of the leases that some process has, by a look at the head."""
        return self.look(self._head.look().head)

    def look(self, head: RunPointer) -> tuple[int, ...]:
        """The same by a head that is known already."""
        self._present = head.lease
        return () if head.lease.holder is None else (head.lease.number,)

    def holder(self, number: int) -> LeaseOwner | None:
        """Who has it."""
        return self._present.holder if number == self._present.number else None

    def heartbeat(self, number: int) -> bytes | None:
        """The last beat, or None if there is none."""
        found = self._head.objects.read(self._head.key(f"{self._present.folder}/{HEARTBEAT}"))
        return None if found is None else found.content


def open_lease_states(root: str, run: str) -> LeaseStates:
    """The leases of a run in the store at `root`."""
    address = S3Address.parse(root)
    return LeaseStates(RunHead(open_objects(address.bucket), address, validate_run_name(run)))


def acquire_lease(
    root: str,
    run: str,
    *,
    note: Mapping[str, str] | None = None,
    wait: bool = False,
    objects: Objects | None = None,
    identity: ProcessIdentity | None = None,
    alive: Callable[[ProcessIdentity], bool | None] = is_alive,
    clock: Clock | None = None,
    expiry_s: float = EXPIRY_S,
) -> S3Lease:
    """Become the only writer of a run; see `infra.backend.acquire_lease`."""
    validate_run_name(run)
    address, clock = S3Address.parse(root), clock or Clock()
    head = RunHead(objects or open_objects(address.bucket), address, run)
    states = LeaseStates(head)
    watch = LeaseExpiry(states, alive, clock, expiry_s)
    while True:
        version = head.read()
        before = version.head.lease
        if not watch.all_gone(states.look(version.head), refuse=not wait):
            clock.sleep(POLL_S)
            continue
        holder = LeaseOwner(identity=identity or this_process(), since_ms=clock.now_ms(), note=dict(note or {}))
        lease = S3Lease(head, LeaseState(number=before.number + 1, token=uuid4().hex, holder=holder), clock)
        if lease.begin(version):
            lease.predecessors = () if before.holder is None else (before.holder,)
            return lease


def ended(head: RunPointer) -> RunPointer:
    """The head after the release of its lease."""
    return head.changed(lease=head.lease.model_copy(update={"holder": None}))
