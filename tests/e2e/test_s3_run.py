"""A run with its artifacts and records in S3: another machine goes on with it, and no secret gets into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from infra.backend import open_records
from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import digests, processes_of, records, start, train, wait_for
from tests.infra.storage.s3.s3_server import S3Server

pytestmark = pytest.mark.thorough
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


def test_a_killed_run_goes_on_where_only_the_bucket_is_left(
    smoke: FinishedRun, s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    store = f"s3://{bucket}/team"
    environment = {**s3_server.environment(), **SECRETS, "PPOFLOW_STORE": store}
    written = open_records(store, "first")
    run = start(tmp_path / "one", "first", **environment)
    wait_for(lambda: len(written.iterations()) >= 2, "iteration 1", run=run, every_s=0.25)
    run.kill()
    said = run.communicate()[0]
    wait_for(lambda: not list(processes_of(tmp_path / "one")), "the end of its engines")
    done = train(tmp_path / "two", "first", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = open_records(store, "first").all()
    leases = [record["lease"] for record in ours]  # on a busy machine some more are committed before the kill
    assert leases == sorted(leases)
    assert set(leases) == {1, 2}
    for here, there in zip(ours, records(smoke.home, "first"), strict=True):
        assert digests(here) == digests(there), here["iteration"]
    assert list(holding(SECRETS.values(), tmp_path, s3_server, bucket)) == []
    found = list(holding(["arithmetic-smoke"], tmp_path, s3_server, bucket))  # what is looked for would be found
    assert {place.startswith("s3://") for place in found} == {True, False}
    assert not any(secret in text for secret in SECRETS.values() for text in (said, done.stdout, done.stderr))
