"""Prefect's server may die under a run: the run goes on, and its page is right once the server is back."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import train
from tests.flows import outage_program

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the runs through all outages, one after the other, have told."""
    home = tmp_path_factory.mktemp("outages")
    done = subprocess.run(
        [sys.executable, "-m", outage_program.__name__, str(home)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.thorough
@pytest.mark.parametrize("outage", outage_program.OUTAGES)
def test_a_run_outlives_its_prefect_server(runs: dict[str, dict[str, Any]], outage: str) -> None:
    found = runs[outage]
    assert (found["committed"], found["state"]) == (outage_program.ITERATIONS + 1, "Completed")
    assert outage == outage_program.KILLED or found["refused"][0] > 0


class WithoutDatabase(http.server.BaseHTTPRequestHandler):
    """A Prefect server whose database is away: it is healthy, and fails at everything else."""

    def do_GET(self) -> None:
        well = self.path.endswith(("/health", "/version"))
        self.send_response(200 if well else 500)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'"3.7.7"' if well else b"{}")

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *words: object) -> None:
        """Quiet."""


@pytest.mark.thorough
def test_a_server_that_only_fails_is_named_and_what_to_do_is_said(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithoutDatabase) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        done = train(tmp_path, "new", PREFECT_API_URL=url, PREFECT_CLIENT_MAX_RETRIES="1")
        server.shutdown()
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert f"Prefect's server at {url} fails or does not answer" in said
    assert "500" in said
    assert "run new: no iteration was committed once it answers ppoflow train" in said
    assert done.stderr == ""
