"""Stacks for tests: on free ports, in a folder that PostgreSQL's user can get to; and small servers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.deploy.stack.bring_up import Servers
from infra.deploy.stack.plan import open_site
from infra.deploy.stack.service import Port, Service
from infra.deploy.stack.site import SERVERS, Site
from infra.deploy.stack.supervisor import Supervisor
from infra.settings import StackSettings
from tests.ports import free_port, free_ports

PORTS = ("postgres_port", "monitor_port", "s3_port", "prefect_port", "mlflow_port", "ray_port", "ray_client_port")
SERVER = Path(__file__).with_name("small_server.py")


def stack_settings(folder: Path, **changed: Any) -> StackSettings:
    """A stack in `folder`, beside any other of this machine."""
    return StackSettings(**{"folder": folder, **dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), **changed})


def stack_folder() -> Path:
    """Not pytest's folder: only its owner may pass through that, and root's PostgreSQL is somebody else."""
    return Path(tempfile.mkdtemp(prefix="stack-", dir="/tmp"))


def site_in(folder: Path, servers: frozenset[str] = frozenset(SERVERS), **changed: Any) -> Site:
    return open_site(stack_settings(folder, **changed), servers)


def bring_up(site: Site, *services: Service) -> Servers:
    """What `up` does, less the questions that it asks before."""
    supervisor = Supervisor(site)
    supervisor.configure(services)
    supervisor.launch()
    servers = Servers(site, services, supervisor)
    servers.bring_up()
    return servers


def small_service(site: Site, name: str = "small", *words: str, **changed: Any) -> Service:
    """A web server of five lines; see `small_server.py` for `words`."""
    port = free_port()
    given = {
        "name": name,
        "address": f"http://127.0.0.1:{port}/",
        "ports": [Port("127.0.0.1", port, "SMALL_PORT")],
        "command": [sys.executable, str(SERVER), str(port), *words],
        "folder": site.folder(name),
        "healthy": lambda: True,
        "grace_s": 1.0 if "deaf" in words else 5.0,
    }
    return Service(**{**given, **changed})
