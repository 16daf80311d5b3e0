"""A real MLflow server that tests start, stop, kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.ports import free_port
from tests.waiting import LONG_S, until


class Server:
    """A real `mlflow server` on one port and one database, as often as it is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True
            )
        until(self.healthy, "MLflow answers")

    def healthy(self) -> bool:
        """Whether it answers; one that has ended never will."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        try:
            with urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes at once."""
        if self.process is None:
            return
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None


def with_long_timeouts(patch: pytest.MonkeyPatch) -> None:
    """Have MLflow's client wait for a busy server, which may take longer than an outage is allowed to cost."""
    patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(LONG_S)))
