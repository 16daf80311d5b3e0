"""The whole store over a network that misbehaves: it completes, or fails clearly; nothing wrong is read as right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.artifacts import ArtifactCorrupted, ArtifactError, ArtifactRef
from infra.artifacts.s3_store import S3Store
from infra.storage.client import Tuning
from infra.storage.objects import StoreUnavailable
from tests.infra.artifacts.artifact_folders import fill, read
from tests.infra.artifacts.stores import machine
from tests.infra.storage.s3.fault_proxy import FAULTS, FaultProxy, Message
from tests.infra.storage.s3.s3_server import S3Server

QUICK = Tuning(connect_s=2, read_s=1, attempts=3, threads=4, part_bytes=2**20)
CONTENT = {"large": os.urandom(5 * 2**19), "small": b"small"}


@pytest.fixture(scope="module")
def bucket_name(s3_server: S3Server) -> str:
    return s3_server.make_bucket()


def through(s3_server: S3Server, proxy: FaultProxy, bucket: str, cache: Path) -> S3Store:
    return machine(s3_server.objects_through(proxy.uri, bucket, QUICK), cache)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fifth_request_is_hit(
    s3_server: S3Server, proxy: FaultProxy, bucket_name: str, tmp_path: Path, fault: str
):
    """What a faulty line does to a put, a find and a fetch; tried again as a task would, it goes well in the end."""
    seen = iter(range(10**6))
    proxy.inject(fault, lambda request: next(seen) % 5 == 2, times=2 if "stall" in fault else 5)
    key = fault.replace(" ", "-")
    here, there = (through(s3_server, proxy, bucket_name, tmp_path / name) for name in ("here", "there"))
    ref: ArtifactRef | None = None
    for _ in range(6):
        try:
            if ref is None:
                ref = here.put(fill(here.scratch(), CONTENT), "scores", key)
            assert there.find("scores", key) == ref
            assert read(there.fetch(ref)) == CONTENT
            break
        except (StoreUnavailable, ArtifactError):
            continue
    assert proxy.hits >= 1
    proxy.inject("", lambda request: False)
    assert ref is not None
    assert read(there.fetch(ref)) == CONTENT


def has_a_range(request: Message) -> bool:
    return "range" in request.fields


def test_a_byte_flipped_on_the_way_is_fetched_again(
    s3_server: S3Server, proxy: FaultProxy, bucket_name: str, tmp_path: Path
):
    here, there = (through(s3_server, proxy, bucket_name, tmp_path / name) for name in ("here", "there"))
    proxy.inject("", has_a_range)
    ref = here.put(fill(here.scratch(), CONTENT), "scores", "flipped")
    proxy.inject("flip in the answer", has_a_range)
    assert read(there.fetch(ref)) == CONTENT
    assert proxy.hits == 1
    proxy.inject("flip in the answer", has_a_range, times=10**6)
    elsewhere = through(s3_server, proxy, bucket_name, tmp_path / "elsewhere")
    with pytest.raises(ArtifactCorrupted, match=r"scores/flipped: file large: expected sha256 \w+, found sha256 \w+"):
        elsewhere.fetch(ref)
    assert not list((tmp_path / "elsewhere/artifacts").glob("*"))
    assert list((tmp_path / "elsewhere/scratch").iterdir()) == []
