"""How a process finds out whether a run's holders still live: by their process here, by their heartbeat elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from infra.process_identity import ProcessIdentity
from infra.runs.owner import LeaseHeld, LeaseOwner, describe

EXPIRY_S = 40.0
POLL_S = 0.5


@dataclass(frozen=True)
class Clock:
    """This machine's clocks. `boot` counts for all processes of the machine alike, also while it sleeps."""

    boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    monotonic: Callable[[], float] = time.monotonic
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    sleep: Callable[[float], None] = time.sleep


class RunLeases(Protocol):
    """The leases of one run, by their numbers."""

    run: str

    def live(self) -> tuple[int, ...]:
        """The numbers of those that some process has, by a look at the store."""

    def holder(self, number: int) -> LeaseOwner | None:
        """Who has a lease; None if it has just ended."""

    def heartbeat(self, number: int) -> bytes | None:
        """The last beat, or None if there is none."""


class LeaseExpiry:
    """Looks at the holders of a run, again and again, until it knows which of them are gone."""

    def __init__(
        self,
        leases: RunLeases,
        alive: Callable[[ProcessIdentity], bool | None],
        clock: Clock,
        expiry_s: float,
    ) -> None:
        self.holders: dict[int, LeaseOwner] = {}
        self._run = leases.run
        self._leases = leases
        self._alive = alive
        self._clock = clock
        self._expiry_s = expiry_s
        self._seen: dict[int, tuple[bytes | None, float]] = {}

    def all_gone(self, numbers: Iterable[int], *, refuse: bool) -> bool:
        """Whether every holder is dead or silent; with `refuse`, LeaseHeld as soon as one is known to live."""
        gone = True
        for number in numbers:
            holder = self._leases.holder(number)
            if holder is None:
                continue
            self.holders[number] = holder
            beats = self._beats(number, holder)
            if beats and refuse:
                raise self._held(number, holder)
            gone = gone and beats is False
        return gone

    def _beats(self, number: int, holder: LeaseOwner) -> bool | None:
        """Whether a holder goes on; None while that is open."""
        alive = self._alive(holder.identity)
        if alive is False:
            return False
        beat, now = self._leases.heartbeat(number), self._clock.monotonic()
        clock = _clock_of(beat) if alive else None
        if clock is not None:
            return self._clock.boot() - clock <= self._expiry_s
        if number not in self._seen:
            self._seen[number] = beat, now
            return None
        before, since = self._seen[number]
        if beat != before:
            self._seen[number] = beat, now
            return True
        return False if now - since >= self._expiry_s else None

    def _held(self, number: int, holder: LeaseOwner) -> LeaseHeld:
        clock = _clock_of(self._leases.heartbeat(number)) if self._alive(holder.identity) else None
        beat = "just now" if clock is None else f"{max(0.0, self._clock.boot() - clock):.0f} s ago"
        return LeaseHeld(
            f"run {self._run}: {describe(holder)} has it, last heard of {beat}: "
            f"wait until it ends, or stop it there (kill {holder.identity.pid})",
            holder,
        )


def beat_of(number: int, clock: Clock) -> bytes:
    """The content of a heartbeat."""
    return json.dumps({"beat": number, "clock": clock.boot()}).encode()


def _clock_of(beat: bytes | None) -> float | None:
    try:
        return float(json.loads(beat or b"")["clock"])
    except (ValueError, KeyError, TypeError):
        return None
