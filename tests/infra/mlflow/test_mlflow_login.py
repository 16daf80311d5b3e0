"""MLflow's clients log in by a file that only its owner can read."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from infra.mlflow.login import FileLogin, read_login
from tests.http_server import serving
from tests.infra.programs import ROOT
from tests.waiting import LONG_S

HIDDEN = "hidden-one"
LOGIN = f"[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = {HIDDEN}%\n"
WELCOME = "Basic YWRtaW46aGlkZGVuLW9uZSU="  # admin:hidden-one%


class Guarded(http.server.BaseHTTPRequestHandler):
    """Has no experiments, and says so to one login alone."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        welcome = self.headers.get("Authorization") == WELCOME
        self.send_response(200 if welcome else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *words: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Guarded) as address:
        yield address


@pytest.fixture
def login(tmp_path: Path) -> Path:
    path = tmp_path / "login"
    path.write_text(LOGIN)
    path.chmod(0o600)
    return path


@pytest.mark.thorough
def test_a_plain_mlflow_command_logs_in_by_the_file(url: str, login: Path) -> None:
    (found,) = [one for one in entry_points(group="mlflow.request_auth_provider") if one.name == "ppoflow"]
    assert found.load() is FileLogin
    names = {"MLFLOW_TRACKING_URI": url, "MLFLOW_TRACKING_AUTH": "ppoflow", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    for changed, expected in (({"PPOFLOW_MLFLOW_CREDENTIALS": str(login)}, 0), ({"MLFLOW_TRACKING_AUTH": ""}, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "mlflow", "experiments", "search"],
            cwd=ROOT,
            env={**os.environ, **names, **changed},
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == expected, done.stderr
        assert HIDDEN not in done.stdout + done.stderr


def test_a_file_that_others_can_read_or_that_holds_no_login_is_refused(login: Path) -> None:
    assert read_login(login) == ("admin", f"{HIDDEN}%")
    login.chmod(0o640)
    with pytest.raises(MlflowException, match=r"can be read by others: chmod 600"):
        read_login(login)
    login.chmod(0o600)
    for text in (f"{HIDDEN}\n", f"[other]\nx = {HIDDEN}\n", "[mlflow]\nmlflow_tracking_username = me\n"):
        login.write_text(text)
        with pytest.raises(MlflowException, match=r"holds no section \[mlflow\] with mlflow_tracking_username") as told:
            read_login(login)
        assert HIDDEN not in str(told.value)
    login.unlink()
    with pytest.raises(MlflowException, match="No such file"):
        read_login(login)


def test_without_a_file_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPOFLOW_MLFLOW_CREDENTIALS", raising=False)
    with pytest.raises(MlflowException, match="name it in PPOFLOW_MLFLOW_CREDENTIALS"):
        FileLogin().get_auth()
