"""Brings servers up side by side, each as soon as what it needs is healthy; and down again in the other order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from infra.deploy.stack.plan import require_free_ports
from infra.deploy.stack.processes import Daemon
from infra.deploy.stack.service import Service, StackError
from infra.deploy.stack.site import Site

POLL_S = 0.1


@dataclass(frozen=True)
class State:
    """How one server is now."""

    name: str
    address: str
    health: str
    log: str

    @property
    def healthy(self) -> bool:
        return self.health.startswith("healthy")


class Runner:
    """The servers of one stack. `say` hears of each as it becomes healthy."""

    def __init__(
        self, site: Site, services: Sequence[Service], *, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._folder = site.settings.folder
        self._stack = site.credentials.stack
        self._daemons = [self._daemon(service) for service in services]
        self._say = say
        self._seconds: dict[str, float] = {}
        self._give_up = Event()
        self._began = time.monotonic()

    def make_way(self) -> None:
        """End what runs with other settings, and what is left of servers that died. StackError where a port that one of
        the servers wants is not free."""
        stale = [daemon for daemon in self._daemons if not daemon.is_current()]
        for daemon in reversed(stale):
            daemon.stop()
        require_free_ports([daemon.service for daemon in stale])

    def up(self) -> None:
        """Start what does not run, and return when all are healthy. StackError when one is not: the others stay, and
        those that need it do not start."""
        done: dict[str, Future[None]] = {}
        errors: list[str] = []
        self._began = time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, len(self._daemons))) as threads:
            try:
                for daemon in self._daemons:  # what a server needs comes before it
                    needed = [done[name] for name in daemon.service.after if name in done]
                    done[daemon.service.name] = threads.submit(self._bring_up, daemon, needed)
                for future in done.values():
                    if (error := future.exception()) is not None:
                        errors.append(str(error))
            except BaseException:
                self._give_up.set()
                raise
        if errors:
            raise StackError("\n".join(errors))

    def down(self) -> None:
        """End all of them, and what ran under settings of before; fine where some or all do not run."""
        known = {daemon.service.name for daemon in self._daemons}
        records = {path.name for path in (self._folder / "run").iterdir()} - known
        former = [Service(name, "", (), healthy=bool, folder=self._folder) for name in sorted(records)]
        for daemon in [*map(self._daemon, former), *reversed(self._daemons)]:
            daemon.stop()

    def running(self) -> set[str]:
        """The names of those that run."""
        return {daemon.service.name for daemon in self._daemons if daemon.running()}

    def states(self) -> list[State]:
        """How all of them are now."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._daemons))) as threads:
            return list(threads.map(self._state, self._daemons))

    def _daemon(self, service: Service) -> Daemon:
        return Daemon(service, folder=self._folder, stack=self._stack)

    def _state(self, daemon: Daemon) -> State:
        service = daemon.service
        health = "not running"
        if service.name in self._seconds:
            health = "healthy"  # it was a moment ago, and asking them all again takes seconds
        elif daemon.running():
            health = "healthy" if daemon.has_its_ports() and service.healthy() else "not healthy"
        return State(service.name, service.address, health, str(daemon.log))

    def _bring_up(self, daemon: Daemon, needed: Sequence[Future[None]]) -> None:
        service = daemon.service
        if any(future.exception() is not None for future in needed):
            raise StackError(f"{service.name}: not started, because it needs what did not start")
        if not daemon.running():
            service.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            service.prepare()
            daemon.start()
        self._wait_until_healthy(daemon)
        service.furnish()
        self._seconds[service.name] = time.monotonic() - self._began
        self._say(f"{service.name} is healthy after {self._seconds[service.name]:.1f} s")

    def _wait_until_healthy(self, daemon: Daemon) -> None:
        service = daemon.service
        deadline = time.monotonic() + service.start_timeout_s
        asked = time.monotonic()
        while not (daemon.has_its_ports() and service.healthy()):
            if self._give_up.is_set():
                raise StackError(f"{service.name}: given up")
            if not daemon.running():
                raise StackError(
                    f"{service.name} ended before it was healthy: mend what its log names. {daemon.tail()}"
                )
            if time.monotonic() > deadline:
                raise StackError(
                    f"{service.name} is not healthy after {service.start_timeout_s:g} s: look at its log, and start "
                    f"the stack again. {daemon.tail()}"
                )
            # Half of the time at most: a question may cost as much as the start itself.
            self._give_up.wait(max(POLL_S, time.monotonic() - asked))
            asked = time.monotonic()
