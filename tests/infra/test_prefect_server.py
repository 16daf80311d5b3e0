from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from infra.prefect_server import PrefectServer, PrefectServerError
from tests.processes import outlived
from tests.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import sys, time
from pathlib import Path
from infra.prefect_server import PrefectServer
server = PrefectServer(Path(sys.argv[1]), port=int(sys.argv[2]))
server.start()
print(server.api_url, flush=True)
server.wait_until_healthy(300)
print("healthy", flush=True)
time.sleep(3600)
"""


@dataclass(frozen=True)
class Owner:
    process: subprocess.Popen[str]
    api_url: str
    home: Path
    taken_port: int


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """A process that owns a server; the port that it asks for is taken."""
    home = tmp_path_factory.mktemp("prefect") / "feature%2Fx?"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(home), str(port)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        yield Owner(process, process.stdout.readline().strip(), home, port)
    process.kill()
    process.wait(LONG_S)
    process.stdout.close()


def get(url: str) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=LONG_S)
    connection.request("GET", parts.path or "/", headers={"Accept": "text/html,application/json"})
    response = connection.getresponse()
    status, body = response.status, response.read().decode()
    connection.close()
    return status, body


def test_it_becomes_healthy_with_ui_and_database_where_they_belong(owner):
    assert owner.process.stdout.readline() == "healthy\n"
    assert get(f"{owner.api_url}/health") == (200, "true")
    status, page = get(owner.api_url.removesuffix("/api"))
    assert (status, page.startswith("<!DOCTYPE html>")) == (200, True)
    settings = json.loads(get(owner.api_url.removesuffix("/api") + "/ui-settings")[1])
    assert settings["api_url"] == owner.api_url
    assert (owner.home / "prefect.db").is_file()
    assert urlsplit(owner.api_url).port != owner.taken_port


def test_it_listens_on_loopback_only(owner):
    port = f"{urlsplit(owner.api_url).port:04X}"
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"] == [f"0100007F:{port}"]


def test_it_is_gone_after_its_owner_was_killed(owner):
    below = [
        pid
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        if str(owner.home).encode() in environment_of(pid)
    ]
    assert below  # the server
    owner.process.kill()
    assert outlived(below) == []
    with pytest.raises(ConnectionRefusedError):
        get(f"{owner.api_url}/health")


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_failed_start_shows_the_log_and_the_remedy(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('the disk is full')")
    server = PrefectServer(tmp_path / "home", port=0, environment={"PYTHONPATH": str(tmp_path)})
    server.start()
    with pytest.raises(PrefectServerError, match=r"exit code 1(?s:.)*PREFECT_API_URL(?s:.)*the disk is full"):
        server.wait_until_healthy(LONG_S)
    server.close()


def test_a_start_that_takes_too_long_says_so(tmp_path):
    (tmp_path / "uvicorn.py").write_text("import time; time.sleep(3600)")
    server = PrefectServer(tmp_path / "home", port=0, environment={"PYTHONPATH": str(tmp_path)})
    server.start()
    with pytest.raises(PrefectServerError, match=r"did not answer within 0\.3 s"):
        server.wait_until_healthy(0.3)
    assert server.running()
    server.close()
    assert not server.running()


def test_a_server_that_was_not_started_says_so(tmp_path):
    with pytest.raises(PrefectServerError, match=r"call start\(\) first"):
        PrefectServer(tmp_path).wait_until_healthy(1)
    with pytest.raises(PrefectServerError, match=r"call start\(\) first"):
        _ = PrefectServer(tmp_path).api_url
