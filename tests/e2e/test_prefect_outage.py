"""A real run whose Prefect server fails from its middle on: it ends well, and its successor puts the page right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from infra.prefect_server import PrefectServer
from tests.e2e.launch import DEADLINE_S, flow_states, record_files, start, train, wait_for
from tests.infra.storage.s3.fault_proxy import FaultProxy

pytestmark = pytest.mark.thorough


def test_a_run_outlives_a_server_that_fails_and_the_next_one_puts_its_page_right(tmp_path: Path) -> None:
    server = PrefectServer(tmp_path / "prefect", port=0)
    server.start()
    server.wait_until_healthy()
    proxy = FaultProxy(int(server.ui_url.rpartition(":")[2]))
    variables = {"PREFECT_API_URL": f"{proxy.uri}/api", "PREFECT_CLIENT_MAX_RETRIES": "1"}
    home = tmp_path / "home"
    try:
        run = start(home, "first", **variables)
        wait_for(lambda: len(record_files(home, "first")) >= 2, "iteration 1", run=run)
        proxy.refuse(500, "DatabaseAway")
        said = run.communicate(timeout=DEADLINE_S)[0]
        assert run.returncode == 0, said
        assert f"Prefect's server at {proxy.uri}/api fails or does not answer" in said
        assert flow_states(tmp_path) == Counter({"Running": 1})
        proxy.inject("", lambda request: False)
        done = train(home, "first", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert flow_states(tmp_path) == Counter({"Crashed": 1, "Completed": 1})
    finally:
        proxy.close()
        server.close()
