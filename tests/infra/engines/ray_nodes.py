"""Ray clusters on the loopback device: every node has an address, a home and a process tree of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import infra.engines.guardian
from tests.ports import free_port
from tests.waiting import LONG_S

# A lost node is noticed after about 2 s instead of 17; and engines are not nicer than whatever else runs here.
QUICK = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",  # of a node that is there and busy; a dead one refuses at once
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class RayNode:
    """One node: `ray start --block` and everything below it, under a guardian, so that it ends with the tests."""

    address: str
    home: Path
    process: subprocess.Popen[bytes]
    lifeline: socket.socket

    def kill(self) -> None:
        """As a power cut does it: all processes at once, without any last word."""
        if self.process.poll() is not None:
            return
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        for process in tree:
            try:
                process.send_signal(signal.SIGSTOP)  # nobody can start others while we kill
            except psutil.NoSuchProcess:
                continue
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.lifeline.close()
        self.process.wait()

    def child(self, name: str) -> int:
        """The process id of the raylet, or another child of that name."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(int(process.pid) for process in children if process.name() == name)


@dataclass
class RayNodes:
    """A cluster with token authentication; `variables` are for whoever connects."""

    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))  # sockets: short
    extra: dict[str, str] = field(default_factory=dict)
    nodes: list[RayNode] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        (self.root / "token").write_text(secrets.token_hex(32))
        (self.root / "token").chmod(0o600)

    @property
    def address(self) -> str:
        """Where the head listens."""
        return f"{self.nodes[0].address}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a member of the cluster."""
        token = str(self.root / "token")
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, "RAY_USAGE_STATS_ENABLED": "0", **self.extra}

    def add(self, resources: str = "{}") -> RayNode:
        """Begin to start a node; the first one is the head."""
        number = len(self.nodes) + 1
        address, home = f"127.0.0.{10 + number}", self.root / f"home-{number}"
        home.mkdir()
        if self.nodes:
            role = [f"--address={self.address}"]
        else:
            self.port = free_port(address)
            role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={address}"),
            *("--block", "--num-cpus=1", "--object-store-memory=80000000", f"--resources={resources}"),
            *("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", "--include-log-monitor=false"),
            f"--temp-dir={self.root / str(number)}",
        ]
        environment = {**os.environ, **self.variables, **QUICK, "PPOFLOW_HOME": str(home)}
        lifeline, theirs = socket.socketpair()
        guardian = [sys.executable, "-I", "-S", infra.engines.guardian.__file__, str(theirs.fileno()), "--"]
        with theirs, (self.root / f"{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [*guardian, *command],
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.nodes.append(RayNode(address, home, process, lifeline))
        if number == 1:
            self._wait_for_head()
        return self.nodes[-1]

    def _wait_for_head(self) -> None:
        deadline = time.monotonic() + LONG_S
        while True:
            try:
                socket.create_connection((self.nodes[0].address, self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.root / "1.log").read_text()
                assert self.nodes[0].process.poll() is None, (self.root / "1.log").read_text()
                time.sleep(0.05)

    def close(self) -> None:
        """Nothing of it is left."""
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.root, ignore_errors=True)
