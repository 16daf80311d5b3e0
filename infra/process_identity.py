"""Which process something belongs to, and whether that process still lives."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

# The kernel gives the first pid namespace of every machine this number; all others belong to containers.
FIRST_NAMESPACE = "4026531836"
MACHINE_ID = Path("/etc/machine-id")
_TOKEN = re.compile(r"(\d+)_(\d+)_(\d+)_([0-9a-f]+)(?:\.([0-9a-f]+))?_([A-Za-z0-9._-]+)")


class ProcessIdentity(BaseModel):
    """One process among all that ever were, on any machine.

    `boot` tells the machine's starts apart, `namespace` its containers, `started` (clock ticks since the boot) the
    processes that had the same pid one after the other. `machine` is a digest of /etc/machine-id, which names the
    machine through all of its starts; empty where there is none, and in what older versions wrote. In a container it
    is empty too: the file there is the image's, so that machines share it, or is made anew with each container.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    boot: str = Field(pattern=r"^[0-9a-f]{1,32}$")
    machine: str = Field(default="", pattern=r"^[0-9a-f]{0,32}$")
    namespace: str = Field(pattern=r"^\d{1,20}$")
    pid: int = Field(ge=1)
    started: int = Field(ge=0)

    @property
    def token(self) -> str:
        """The identity as a part of a file name; `identity_of_token` reads it back."""
        machine = self.machine and f".{self.machine}"
        return f"{self.pid}_{self.started}_{self.namespace}_{self.boot}{machine}_{self.host}"


def identity_of_token(token: str) -> ProcessIdentity | None:
    """The process that a token names, or None if this is no token."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        return None
    pid, started, namespace, boot, machine, host = match.groups(default="")
    try:
        return ProcessIdentity(
            host=host, boot=boot, machine=machine, namespace=namespace, pid=int(pid), started=int(started)
        )
    except ValueError:
        return None


def this_process() -> ProcessIdentity:
    """The process that calls this; a fork of it is another one."""
    pid = os.getpid()
    found = _state(pid)
    if found is None:
        raise RuntimeError(f"/proc/{pid}/stat cannot be read: mount /proc, as every Linux does")
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return ProcessIdentity(
        host=re.sub(r"[^A-Za-z0-9.-]", "-", os.uname().nodename)[:64] or "unnamed",
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""),
        machine=_machine() if namespace == FIRST_NAMESPACE else "",
        namespace=namespace,
        pid=pid,
        started=found[1],
    )


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Whether a process lives; None where this process cannot tell: on another machine, or in another container.

    Of a machine that has been started again since, that is known by its machine id. Copies of a machine's disk may
    share that, and a container in the machine's own namespace has its image's: so the name must be the same as well.
    Between containers, and without a machine id, only a heartbeat can tell.
    """
    here = this_process()
    if identity.boot != here.boot:
        same = here.machine != "" and (identity.machine, identity.host) == (here.machine, here.host)
        return False if same else None
    if identity.namespace != here.namespace:
        return None
    found = _state(identity.pid)
    if found is not None:
        state, started = found
        return started == identity.started and state not in "ZX"
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # There is one with this pid, but /proc is mounted so that it hides other users' processes.
    return None


def _machine() -> str:
    """A digest of this machine's id, which is not to be shown to others; empty where it has none."""
    try:
        given = MACHINE_ID.read_bytes().strip()
    except OSError:
        return ""
    known = re.fullmatch(rb"[0-9a-f]{32}", given)  # a system in its first start has "uninitialized"
    return hashlib.sha256(b"ppoflow " + given).hexdigest()[:16] if known else ""


def _state(pid: int) -> tuple[str, int] | None:
    """The state letter and the start time of a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold anything, so count from its end: field 3 is the state, field 22 the start.
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])
