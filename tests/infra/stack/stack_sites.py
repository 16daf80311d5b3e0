"""Stacks for tests: on free ports, in a folder that PostgreSQL's user can get to; and small servers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.deploy.stack.plan import open_site
from infra.deploy.stack.service import Port, Service
from infra.deploy.stack.site import SERVERS, Site
from infra.settings import StackSettings
from tests.ports import free_port, free_ports

PORTS = ("postgres_port", "monitor_port", "s3_port", "prefect_port", "mlflow_port", "ray_port", "ray_client_port")
SERVER = """
import http.server, signal, subprocess, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "parent" in sys.argv:
    print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def stack_settings(folder: Path, **changed: Any) -> StackSettings:
    """A stack in `folder`, beside any other of this machine."""
    return StackSettings(**{"folder": folder, **dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), **changed})


def stack_folder() -> Path:
    """Not pytest's folder: only its owner may pass through that, and root's PostgreSQL is somebody else."""
    return Path(tempfile.mkdtemp(prefix="stack-", dir="/tmp"))


def site_in(folder: Path, servers: frozenset[str] = frozenset(SERVERS), **changed: Any) -> Site:
    return open_site(stack_settings(folder, **changed), servers)


def small_service(site: Site, name: str = "small", *words: str, **changed: Any) -> Service:
    """A web server of five lines; `words` are "deaf" to SIGTERM and "parent" of a child."""
    port = free_port()
    given = {
        "name": name,
        "address": f"http://127.0.0.1:{port}/",
        "ports": [Port("127.0.0.1", port, "SMALL_PORT")],
        "command": [sys.executable, "-c", SERVER, str(port), *words],
        "folder": site.folder(name),
        "healthy": lambda: True,
        "grace_s": 0.3 if "deaf" in words else 5.0,
    }
    return Service(**{**given, **changed})
