"""A real run whose S3 server goes away for half a minute; one that is interrupted while it waits."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import IO

import pytest

from infra.backend import open_records
from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import DEADLINE_S, digests, processes_of, records, start, wait_for
from tests.infra.storage.s3.fault_proxy import FaultProxy
from tests.infra.storage.s3.s3_server import S3Server

pytestmark = pytest.mark.thorough
AWAY_S, SOON_S = 30.0, 300.0
ASKED_EVERY_S = 0.25


def test_a_run_waits_for_its_store_and_an_interrupt_ends_the_wait(
    smoke: FinishedRun, s3_server: S3Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = f"s3://{bucket}/team"
    environment = {**s3_server.environment(proxy.uri), "PPOFLOW_STORE": store}
    run = start(tmp_path / "home", "first", **environment)
    committed = open_records(store, "first").iterations
    wait_for(lambda: len(committed()) >= 2, "iteration 1", run=run, every_s=ASKED_EVERY_S)
    proxy.away_for(AWAY_S)
    said = run.communicate(timeout=DEADLINE_S)[0]
    assert run.returncode == 0, said
    assert f"! S3 at {proxy.uri} does not answer: waiting for it for up to 15 min\n" in said
    assert f"! S3 at {proxy.uri} answers again, after " in said
    ours = open_records(store, "first").all()
    assert {record["lease"] for record in ours} == {1}
    for here, there in zip(ours, records(smoke.home, "first"), strict=True):
        assert digests(here) == digests(there), here["iteration"]
    run = start(tmp_path / "home", "first", "--set", "iterations=20", **environment)
    wait_for(lambda: len(committed()) >= len(ours) + 1, "one more", run=run, every_s=ASKED_EVERY_S)
    proxy.go_away()
    assert run.stdout is not None
    read_until(run.stdout, "does not answer")
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    began = time.monotonic()
    read_until(run.stdout, "run first: interrupted; finished work is kept")
    assert time.monotonic() - began < SOON_S
    assert run.wait(DEADLINE_S) == 130
    wait_for(lambda: not list(processes_of(tmp_path / "home")), "the end of its engines")


def read_until(lines: IO[str], text: str) -> None:
    """Go on to the line that holds it."""
    seen = ""
    while text not in seen:
        line = lines.readline()
        assert line, seen
        seen += line
