"""Brings servers up side by side, each as soon as what it needs is healthy, and tells how they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from infra.deploy.stack.probes import listening
from infra.deploy.stack.service import Service, StackError
from infra.deploy.stack.site import Site
from infra.deploy.stack.supervisor import Supervised, Supervisor
from infra.deploy.stack.supervisor_config import log_path

POLL_S = 0.1
TAIL_LINES = 20
TAIL_BYTES = 2**16
ENDED = -1


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


class Servers:
    """The servers of one stack. `say` hears of each as it becomes healthy."""

    def __init__(
        self,
        site: Site,
        services: Sequence[Service],
        supervisor: Supervisor,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._site = site
        self._services = services
        self._supervisor = supervisor
        self._say = say
        self._healthy: set[str] = set()
        self._give_up = Event()
        self._began = time.monotonic()

    def bring_up(self) -> None:
        """Start what does not run, and return when all are healthy. StackError when one is not: the others stay, and
        those that need it do not start."""
        done: dict[str, Future[None]] = {}
        errors: list[str] = []
        self._began = time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, len(self._services))) as threads:
            try:
                for service in self._services:  # what a server needs comes before it
                    needed = [done[name] for name in service.after if name in done]
                    done[service.name] = threads.submit(self._bring_up, service, needed)
                for future in done.values():
                    if (error := future.exception()) is not None:
                        errors.append(str(error))
            except BaseException:
                self._give_up.set()
                raise
        if errors:
            raise StackError("\n".join(errors))

    def states(self) -> list[State]:
        """How all of them are now."""
        found = self._supervisor.servers()
        with ThreadPoolExecutor(max_workers=max(1, len(self._services))) as threads:
            return list(threads.map(lambda service: self._state(service, found.get(service.name)), self._services))

    def _state(self, service: Service, server: Supervised | None) -> State:
        health = "not running"
        if service.name in self._healthy:
            health = "healthy"  # it was a moment ago, and asking them all again takes seconds
        elif server is not None and server.runs:
            health = "healthy" if _is_healthy(service, server.pid) else "not healthy"
        return State(service.name, service.address, health, str(log_path(self._site, service.name)))

    def _bring_up(self, service: Service, needed: Sequence[Future[None]]) -> None:
        if any(future.exception() is not None for future in needed):
            raise StackError(f"{service.name}: not started, because it needs what did not start")
        log = log_path(self._site, service.name)
        written = log.stat().st_size if log.exists() else 0
        if not self._supervisor.server(service.name).runs:
            service.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            service.prepare()
            self._supervisor.start(service.name)
        self._wait_until_healthy(service, lambda: _tail(log, written))
        service.furnish()
        self._healthy.add(service.name)
        self._say(f"{service.name} is healthy after {time.monotonic() - self._began:.1f} s")

    def _wait_until_healthy(self, service: Service, tail: Callable[[], str]) -> None:
        pid = self._supervisor.server(service.name).pid or ENDED
        asked = time.monotonic()
        deadline = asked + service.start_timeout_s
        tries = service.tries
        while not self._give_up.is_set():
            server = self._supervisor.server(service.name)
            if server.pid != pid:
                tries -= bool(pid)
                pid = server.pid  # none until supervisord starts it again
            if not tries or not server.is_kept:
                self._supervisor.stop(service.name)  # it would be started again for ever
                raise StackError(f"{service.name} ended before it was healthy: mend what its log names. {tail()}")
            if pid and _is_healthy(service, pid):
                return
            if time.monotonic() > deadline:
                raise StackError(
                    f"{service.name} is not healthy after {service.start_timeout_s:g} s: look at its log, and start "
                    f"the stack again. {tail()}"
                )
            # Half of the time at most: a question may cost as much as the start itself.
            self._give_up.wait(max(POLL_S, time.monotonic() - asked))
            asked = time.monotonic()
        raise StackError(f"{service.name}: given up")


def _is_healthy(service: Service, pid: int) -> bool:
    """It answers, and its ports are its own: an answer alone may be a stranger's."""
    return {port.number for port in service.ports} <= {number for _, number in listening(pid)} and service.healthy()


def _tail(log: Path, start: int) -> str:
    """The last lines that were written behind `start`."""
    if not log.exists():
        return f"{log} is empty"
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([f"The last lines of {log}:", *(lines[-TAIL_LINES:] or ["(nothing)"])])
