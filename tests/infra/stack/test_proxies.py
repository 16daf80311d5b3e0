"""A proxy of the environment, which knows nothing of this machine's loopback, is asked for nothing of the stack's."""

from __future__ import annotations

import http.server
import sys
from pathlib import Path

import pytest

from infra.deploy.stack.__main__ import main
from infra.deploy.stack.buckets import keys_work
from infra.deploy.stack.plan import services
from tests.http_server import serving
from tests.infra.stack.stack_sites import site_in
from tests.ports import free_port

OUTSIDE = "192.0.2.7"
BUCKETS = b"<ListAllMyBucketsResult><Owner><ID>me</ID></Owner><Buckets/></ListAllMyBucketsResult>"


class Buckets(http.server.BaseHTTPRequestHandler):
    """An S3 without buckets."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BUCKETS)))
        self.end_headers()
        self.wfile.write(BUCKETS)

    def log_message(self, format: str, *words: object) -> None:
        """Quiet."""


@pytest.fixture(autouse=True)
def _proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer."""
    for name in ("HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("NO_PROXY", "no_proxy"):  # what is set by the command goes with the test
        monkeypatch.setenv(name, "a.corp")


def test_a_command_of_the_stack_asks_its_s3_directly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(Buckets) as address:
        port = int(address.rpartition(":")[2])
        site = site_in(tmp_path / "stack", s3_port=port)
        monkeypatch.setattr(sys, "argv", ["stack", "packages"])
        with pytest.raises(SystemExit):
            main()
        assert keys_work(site)


def test_a_shell_that_uses_the_stack_and_its_worker_ask_it_directly(tmp_path: Path) -> None:
    site = site_in(tmp_path / "stack", host=OUTSIDE)
    (worker,) = [service for service in services(site) if service.name == "worker"]
    for environment in (site.client_environment(), worker.environment):
        assert environment["no_proxy"] == environment["NO_PROXY"] == f"a.corp,127.0.0.1,localhost,{OUTSIDE}"
