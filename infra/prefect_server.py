"""The embedded Prefect server: API and UI on one loopback port, as a child that ends when we do, even by SIGKILL.

Its database is `<home>/prefect.db`, which `prefect server start` opens later just as well. Two of our processes with
one home each run a server of their own, on different ports over the same database (sqlite locks; the same history in
both UIs): a shared one would end under the other process when its owner ends.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from infra import imported_first
from infra.addresses import sqlite_url
from infra.empty_databases import begin
from infra.engines.guarded_process import GuardedProcess
from infra.settings import child_environment

SERVER = "prefect.server.api.server"
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 4200
DATABASE = "prefect.db"


class PrefectServerError(RuntimeError):
    """The server did not come up. The message carries the tail of its log."""


class PrefectServer:
    """`start()` early, do something else for 4 to 10 s, then `wait_until_healthy()`.

    The port is `port` if that is free, else any. `environment` is added to the server's own.
    """

    def __init__(
        self, home: Path, *, log: Path | None = None, port: int = DEFAULT_PORT, environment: Mapping[str, str] = {}
    ) -> None:
        self.home = home.absolute()
        self.log = (log or self.home / "server.log").absolute()
        self._wanted_port = port
        self._environment = dict(environment)
        self._port = 0
        self._process: GuardedProcess | None = None

    @property
    def ui_url(self) -> str:
        if not self._port:
            raise PrefectServerError(f"the Prefect server in {self.home} has no address yet: call start() first")
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def api_url(self) -> str:
        return f"{self.ui_url}/api"

    def start(self) -> None:
        """Starts it and returns at once; requests sent from now on wait until the server takes them."""
        if self._process is not None and self._process.running():
            return
        try:
            self.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PrefectServerError(
                f"{self.home} cannot be created ({error.strerror}): set PPOFLOW_HOME to a writable folder"
            ) from None
        begin("prefect", self.home / DATABASE)
        # We listen and hand the socket on, so nobody can take the port in the seconds before the server listens.
        with _listen(self._wanted_port) as listener:
            self._port = listener.getsockname()[1]
            server = [f"{SERVER}:create_app", "--factory", "--fd", str(listener.fileno())]
            quiet = ["--log-level", "warning", "--no-access-log"]
            self._process = GuardedProcess(
                [sys.executable, "-P", imported_first.__file__, SERVER, "uvicorn", *server, *quiet],
                log=self.log,
                environment=child_environment({**self._settings(), **self._environment}),
                pipes=False,
                keep=[listener.fileno()],
            )

    def running(self) -> bool:
        return self._process is not None and self._process.running()

    def wait_until_healthy(self, timeout_s: float = 120.0) -> None:
        """Returns when /api/health answers; PrefectServerError when the server ended or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not self._healthy(min(1.0, max(0.05, deadline - time.monotonic()))):
            if self._process is None:
                raise PrefectServerError(f"the Prefect server in {self.home} is not started: call start() first")
            if not self._process.running():
                raise PrefectServerError(
                    f"the Prefect server in {self.home} {self._process.ending()}: fix what its log says, or set "
                    f"PREFECT_API_URL to a running server. {self._process.tail()}"
                )
            if time.monotonic() > deadline:
                raise PrefectServerError(
                    f"the Prefect server in {self.home} did not answer within {timeout_s:g} s: try again, or set "
                    f"PREFECT_API_URL to a running server. {self._process.tail()}"
                )

    def close(self) -> None:
        """Ends it; what it acknowledged is in its database. start() may follow, perhaps with another port."""
        if self._process is not None:
            self._process.kill()
            self._process.release()
            self._process = None

    def _healthy(self, timeout_s: float) -> bool:
        if not self.running():
            return False
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=timeout_s)
        try:
            connection.request("GET", "/api/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
            return False
        finally:
            connection.close()

    def _settings(self) -> dict[str, str]:
        return {
            **self._ui_folder(),
            "PREFECT_HOME": str(self.home),
            "PREFECT_PROFILE": "ephemeral",  # Prefect brings it along; one that the shell names is not in our home
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": sqlite_url(self.home / DATABASE, "sqlite+aiosqlite"),
            "PREFECT_SERVER_UI_ENABLED": "true",
            "PREFECT_SERVER_UI_API_URL": self.api_url,
            "PREFECT__SERVER_EPHEMERAL": "",
            "PREFECT__SERVER_WEBSERVER_ONLY": "",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }

    def _ui_folder(self) -> dict[str, str]:
        """Prefect unpacks its UI (55 MB) into its own package; where that is not ours to write, into our home."""
        package = find_spec("prefect")
        if package is None or package.origin is None:
            raise PrefectServerError("the package prefect is not installed: install ppoflow with its dependencies")
        if os.access(Path(package.origin).parent / "server", os.W_OK):
            return {}
        return {"PREFECT_SERVER_UI_STATIC_DIRECTORY": str(self.home / "ui")}


def _listen(port: int) -> socket.socket:
    for candidate in (port, 0):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Accepted sockets inherit NODELAY; asyncio sets it for TCP only, and uvicorn's --fd claims a unix socket.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((LOOPBACK, candidate))
            listener.listen(128)
        except OSError:
            listener.close()
            if candidate == 0:
                raise
        else:
            return listener
    raise AssertionError("a free port or an OSError comes first")
