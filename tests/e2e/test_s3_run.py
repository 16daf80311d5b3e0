"""A run with its artifacts and records in S3: another machine goes on with it, waits while S3 is away, and no
secret gets into it. One that is interrupted while it waits ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
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
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canary-of-the-store",
    "AWS_SESSION_TOKEN": "canary-of-the-session",
    "HF_TOKEN": "canary-of-the-hub",
    "MLFLOW_TRACKING_PASSWORD": "canary-of-tracking",
    "PREFECT_API_KEY": "canary-of-prefect",
    "JUDGE_API_KEY": "canary-of-the-users-own-judge",
}


def holding(texts: Iterable[str], home: Path, server: S3Server, bucket: str) -> Iterator[str]:
    """Every file and every object in which one of these is."""
    wanted = [text.encode() for text in texts]
    for path in home.rglob("*"):
        if path.is_file() and any(text in path.read_bytes() for text in wanted):
            yield str(path)
    for page in server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", []):
            content = server.client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            if any(text in content for text in wanted):
                yield f"s3://{bucket}/{entry['Key']}"


def test_a_run_outlives_the_loss_of_its_machine_and_an_outage_of_its_store(
    smoke: FinishedRun, s3_server: S3Server, bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = f"s3://{bucket}/team"
    environment = {**s3_server.environment(proxy.uri), **SECRETS, "PPOFLOW_STORE": store}
    committed = open_records(store, "first").iterations
    run = start(tmp_path / "one", "first", **environment)
    wait_for(lambda: len(committed()) >= 2, "iteration 1", run=run, every_s=ASKED_EVERY_S)
    run.kill()
    said = run.communicate()[0]
    wait_for(lambda: not list(processes_of(tmp_path / "one")), "the end of its engines")
    before = len(committed())

    run = start(tmp_path / "two", "first", **environment)
    wait_for(lambda: len(committed()) > before, "one more elsewhere", run=run, every_s=ASKED_EVERY_S)
    proxy.away_for(AWAY_S)
    output = run.communicate(timeout=DEADLINE_S)[0]
    assert run.returncode == 0, output
    assert f"! S3 at {proxy.uri} does not answer: waiting for it for up to 15 min\n" in output
    assert f"! S3 at {proxy.uri} answers again, after " in output
    ours = open_records(store, "first").all()
    assert [record["lease"] for record in ours] == [1] * before + [2] * (len(ours) - before)
    for here, there in zip(ours, records(smoke.home, "first"), strict=True):
        assert digests(here) == digests(there), here["iteration"]
    assert list(holding(SECRETS.values(), tmp_path, s3_server, bucket)) == []
    found = list(holding(["arithmetic-smoke"], tmp_path, s3_server, bucket))  # what is looked for would be found
    assert {place.startswith("s3://") for place in found} == {True, False}
    assert not any(secret in text for secret in SECRETS.values() for text in (said, output))

    run = start(tmp_path / "two", "first", "--set", "iterations=20", **environment)
    wait_for(lambda: len(committed()) > len(ours), "one more", run=run, every_s=ASKED_EVERY_S)
    proxy.go_away()
    assert run.stdout is not None
    read_until(run.stdout, "does not answer")
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    began = time.monotonic()
    read_until(run.stdout, "run first: interrupted; finished work is kept")
    assert time.monotonic() - began < SOON_S
    assert run.wait(DEADLINE_S) == 130
    wait_for(lambda: not list(processes_of(tmp_path / "two")), "the end of its engines")


def read_until(lines: IO[str], text: str) -> None:
    """Go on to the line that holds it."""
    seen = ""
    while text not in seen:
        line = lines.readline()
        assert line, seen
        seen += line
