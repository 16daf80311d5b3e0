"""The supervisord of one stack: it runs the servers, starts again what dies, and ends them one after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from infra.deploy.stack.credentials import write_private
from infra.deploy.stack.orphans import end_marked
from infra.deploy.stack.probes import listening
from infra.deploy.stack.service import Service, StackError
from infra.deploy.stack.site import Site
from infra.deploy.stack.supervisor_config import (
    SUPERVISORD,
    configuration_path,
    log_path,
    mark,
    own_sections,
    program_section,
    socket_path,
)
from infra.settings import child_environment

# More than all servers take to end, one after the other.
END_S = 240.0
ORPHANS_S = 15.0
SPAWN_ERROR, ALREADY_STARTED, NOT_RUNNING = 50, 60, 70


@dataclass(frozen=True)
class Supervised:
    """A server as supervisord sees it; `pid` is 0 where its main process does not run."""

    pid: int
    state: str

    @property
    def runs(self) -> bool:
        return self.state in ("STARTING", "RUNNING")

    @property
    def is_kept(self) -> bool:
        """Whether it runs, or is about to be started again."""
        return self.state not in ("STOPPED", "FATAL")


class Supervisor:
    """One for each folder of a stack; it need not run."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._path = configuration_path(site)

    def servers(self) -> dict[str, Supervised]:
        """All that it has, among them the listener to its events; none where it does not run."""
        try:
            found = self._order(lambda rpc: rpc.getAllProcessInfo())
        except StackError:
            return {}
        return {one["name"]: Supervised(one["pid"], one["statename"]) for one in found}

    def server(self, name: str) -> Supervised:
        return self.servers().get(name, Supervised(0, "STOPPED"))

    def kept(self) -> set[str]:
        """The names of those that run, or are about to be started again."""
        return {name for name, server in self.servers().items() if server.is_kept}

    def ports(self) -> set[tuple[str, int]] | None:
        """The addresses and TCP ports on which its servers take connections; None where it does not run."""
        servers = self.servers().values()
        return set().union(*(listening(server.pid) for server in servers if server.pid)) if servers else None

    def configure(self, services: Sequence[Service]) -> None:
        """Write the configuration. What runs with another one ends, and so do servers that nobody looks after."""
        own = own_sections(self._site)
        is_same = self._path.exists() and self._path.read_text().startswith(own)
        write_private(self._path, own + "".join(program_section(self._site, service) for service in services))
        if not (is_same and self.servers()):
            self.end()
            return
        self._order(_take_over)

    def launch(self) -> None:
        """Start it, where it does not run. It goes to the background once it listens, and outlives us."""
        if self.servers():
            return
        socket_path(self._site).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(self._path)],
            env=child_environment(mark(self._site, SUPERVISORD), without=self._site.hidden()),
            umask=0o077,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise StackError(f"supervisord does not start: {(done.stderr or done.stdout).strip()[-500:]}")

    def start(self, name: str) -> None:
        """Start a server and return at once; one that has ended by then is started again, as later."""
        self._order(lambda rpc: rpc.startProcess(name, False), unless=(ALREADY_STARTED, SPAWN_ERROR))

    def stop(self, name: str) -> None:
        """End a server, and do not start it again."""
        self._order(lambda rpc: rpc.stopProcess(name), unless=(NOT_RUNNING,))

    def end(self) -> None:
        """End it, and by that the servers; then what one that was killed has left. Fine where nothing runs."""
        stack = self._site.credentials.stack
        end_marked(f"{stack}.{SUPERVISORD}", timeout_s=END_S, children=False)
        end_marked(f"{stack}.", timeout_s=ORPHANS_S, children=True)

    def _order(self, order: Callable[[Any], Any], unless: Collection[int] = ()) -> Any:
        """Its answer. StackError where there is none, or where it refuses for another reason than one of `unless`."""
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(serverurl=f"unix://{socket_path(self._site)}")
        try:
            with ServerProxy("http://localhost", transport=transport) as proxy:
                return order(proxy.supervisor)
        except Fault as fault:
            if fault.faultCode in unless:
                return None
            raise StackError(f"supervisord refuses: {fault.faultString}") from None
        except OSError as error:
            where = log_path(self._site, SUPERVISORD)
            remedy = f"look at {where}, and start the stack again"
            raise StackError(f"supervisord does not answer ({error}): {remedy}") from None


def _take_over(rpc: Any) -> None:
    """What `supervisorctl update` does; new programs do not start by that."""
    added, changed, removed = rpc.reloadConfig()[0]
    for name in reversed([*changed, *removed]):
        rpc.stopProcessGroup(name)
        rpc.removeProcessGroup(name)
    for name in [*changed, *added]:
        rpc.addProcessGroup(name)
