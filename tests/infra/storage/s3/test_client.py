"""Calls to S3 over a network that misbehaves: each happens, or says what is wrong; nothing wrong is taken for right."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path

import pytest

from infra.artifacts import StoreUnsupported, open_store
from infra.storage.client import Tuning, open_objects
from infra.storage.objects import DownloadRequest, DownloadResult, Objects, S3Address, StoreRefused, StoreUnavailable
from tests.infra.storage.s3.fault_proxy import FAULTS, FaultProxy, Message
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.infra.storage.s3.s3_server import S3Server
from tests.ports import free_port

# Small parts, and timeouts that a test can wait for.
QUICK = Tuning(connect_s=2, read_s=1, attempts=4, threads=4, part_bytes=3 * 2**19)
LARGE = 7 * 2**19
LAST_PART = f"bytes={6 * 2**19}-"


@pytest.fixture(scope="module")
def through_the_proxy(s3_server: S3Server, proxy: FaultProxy) -> Objects:
    return s3_server.objects_through(proxy.uri, s3_server.make_bucket(), QUICK)


@pytest.fixture
def objects(through_the_proxy: Objects, proxy: FaultProxy) -> Objects:
    proxy.inject("", puts, times=0)
    through_the_proxy.remove([entry.key for entry in through_the_proxy.entries("")])
    for left in through_the_proxy.pending(""):
        through_the_proxy.abandon(left)
    return through_the_proxy


def puts(request: Message) -> bool:
    return request.first_line.startswith("PUT")


def gets(request: Message) -> bool:
    return request.first_line.startswith("GET")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(params=["server", "memory"])
def either(request: pytest.FixtureRequest) -> Objects:
    return request.getfixturevalue("objects") if request.param == "server" else MemoryObjects()


def test_conditional_puts(either: Objects):
    first = either.create("k", b"one")
    assert first is not None
    assert either.create("k", b"another") is None
    second = either.replace("k", b"two", first)
    assert second is not None
    assert either.replace("k", b"three", first) is None
    assert either.replace("absent", b"three", first) is None
    found = either.read("k")
    assert found is not None
    assert (found.content, found.etag) == (b"two", second)
    assert '"' not in second


def test_more_files_than_may_be_open_come_down(objects: Objects, tmp_path: Path):
    files = {f"f/{number}": str(number).encode() for number in range(120)}
    for key, content in files.items():
        objects.write(key, content)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 60, allowed[1]))
    try:
        arrived = objects.download(
            [DownloadRequest(key, len(content), tmp_path / key) for key, content in files.items()]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert {key: found.sha256 for key, found in arrived.items()} == {key: sha256(tmp_path / key) for key in files}
    assert {key: (tmp_path / key).read_bytes() for key in files} == files


def test_listing_copying_removing(either: Objects):
    names = [f"a/{number:04}/x" for number in range(1003)]
    for name in names[:3]:
        either.write(name, b"abc")
    assert either.copy("a/0000/x", "b/x")
    assert not either.copy("absent", "b/y")
    assert [(entry.key, entry.size) for entry in either.entries("a/")] == [(name, 3) for name in names[:3]]
    assert (either.folders(""), either.folders("a/"), either.folders("c/")) == (
        ["a", "b"],
        ["0000", "0001", "0002"],
        [],
    )
    either.remove(["b/x", *names])
    assert list(either.entries("")) == []


def test_files_there_and_back(either: Objects, tmp_path: Path):
    content = {"empty": b"", "small": b"x", "medium": os.urandom(2 * 2**20), "large": os.urandom(LARGE)}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    either.upload({f"up/{name}": tmp_path / name for name in content})
    wanted = [DownloadRequest(f"up/{name}", len(data), tmp_path / "down" / name) for name, data in content.items()]
    arrived = either.download(wanted)
    for name, data in content.items():
        assert arrived[f"up/{name}"] == DownloadResult(len(data), hashlib.sha256(data).hexdigest())
        assert (tmp_path / "down" / name).read_bytes() == data
    assert list(either.pending("up/")) == []
    # Objects of another size are not fetched at all.
    for size in (1, LARGE - 1, 2 * LARGE):
        assert either.download([DownloadRequest("up/large", size, tmp_path / "no")]) == {
            "up/large": DownloadResult(LARGE)
        }
    assert either.download([DownloadRequest("absent", LARGE, tmp_path / "no")]) == {"absent": DownloadResult(None)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_conditional_put_happens_once(objects: Objects, proxy: FaultProxy, fault: str):
    proxy.inject(fault, puts)
    first = objects.create("k", b"one")
    assert proxy.hits == 1
    assert objects.create("k", b"another") is None
    assert objects.create("k", b"one") == first, "a second try of the same"
    found = objects.read("k")
    assert found is not None
    assert (found.content, found.etag) == (b"one", first)
    if "stall" not in fault:
        proxy.inject(fault, puts)
    second = objects.replace("k", b"two", found.etag)
    assert proxy.hits == 1
    assert objects.replace("k", b"three", found.etag) is None
    assert (objects.read("k") or found).etag == second


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_read_is_what_was_written(objects: Objects, proxy: FaultProxy, fault: str):
    content = b"0123456789" * 1000
    objects.write("k", content)
    proxy.inject(fault, gets)
    found = objects.read("k")
    assert proxy.hits == 1
    assert found is not None
    # Nothing tells that these two are wrong; small objects carry a checksum of their own, which their readers compare.
    if fault not in ("flip in the answer", "cut answer of unknown length"):
        assert found.content == content


def begins(request: Message) -> bool:
    return request.first_line.startswith("POST") and "uploads" in request.first_line


def sends_a_part(request: Message) -> bool:
    return request.first_line.startswith("PUT") and "partNumber=2" in request.first_line


def completes(request: Message) -> bool:
    return request.first_line.startswith("POST") and "uploadId" in request.first_line


def gets_the_last_part(request: Message) -> bool:
    return request.fields.get("range", "").startswith(LAST_PART)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_large_file_arrives_as_it_is_or_is_seen_not_to(
    objects: Objects, proxy: FaultProxy, tmp_path: Path, fault: str
):
    (tmp_path / "up").write_bytes(os.urandom(LARGE))
    for chosen in (sends_a_part, completes)[: 1 if "stall" in fault else 2]:
        proxy.inject(fault, chosen)
        objects.upload({"k": tmp_path / "up"})
        assert proxy.hits == 1
    proxy.inject(fault, gets_the_last_part)
    arrived = objects.download([DownloadRequest("k", LARGE, tmp_path / "down")])["k"]
    assert proxy.hits == 1
    assert arrived.sha256 == sha256(tmp_path / "down")
    assert (arrived.sha256 == sha256(tmp_path / "up")) == (fault != "flip in the answer")
    assert list(objects.pending("")) == []


def test_an_upload_that_nobody_goes_on_with_is_found(objects: Objects, proxy: FaultProxy, tmp_path: Path):
    (tmp_path / "up").write_bytes(os.urandom(LARGE))
    proxy.inject("reset after", begins)
    objects.upload({"a/k": tmp_path / "up"})
    assert list(objects.pending("b/")) == []
    (left,) = objects.pending("a/")
    assert left.key == "a/k"
    for _ in range(2):
        objects.abandon(left)
    assert list(objects.pending("")) == []


@pytest.mark.parametrize("fault", ["500", "reset after"])
def test_what_never_works_says_so(objects: Objects, proxy: FaultProxy, tmp_path: Path, fault: str):
    (tmp_path / "up").write_bytes(os.urandom(LARGE))
    objects.write("k", b"x" * 100)
    proxy.inject(fault, lambda request: True, times=2**31)
    calls = [
        lambda: objects.create("k", b"x"),
        lambda: objects.upload({"k": tmp_path / "up"}),
        lambda: objects.download([DownloadRequest("k", 100, tmp_path / "down")]),
    ]
    for call in calls:
        with pytest.raises(
            StoreUnavailable, match=r"S3 could not (read|write) 'k' in bucket 'tests-\d+' \(.*try again"
        ):
            call()


def test_a_server_that_is_not_there(bucket: str, monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("infra.storage.outage.START_S", 0.5)
    with pytest.raises(StoreUnavailable, match=rf"bucket '{bucket}' \(.*{port}.*try again"):
        open_objects(bucket, tuning=QUICK)


def test_a_bucket_that_does_not_exist(bucket: str, tmp_path: Path):
    with pytest.raises(StoreRefused, match="no bucket 'absent-bucket': create it, or set PPOFLOW_STORE"):
        open_store("s3://absent-bucket/x", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_no_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreRefused, match=r"no usable credentials.*AWS_PROFILE"):
        open_objects(bucket)
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(StoreRefused, match=r"no usable credentials.*absent"):
        open_objects(bucket)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("AccessDenied", "does not let these credentials open.*allow them to list, read, write and delete"),
        ("InvalidAccessKeyId", "does not accept the credentials.*give boto3 valid ones"),
        ("SignatureDoesNotMatch", "does not accept the credentials"),
    ],
)
def test_a_refusal_is_said_at_once(
    bucket: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, code: str, complaint: str
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
    proxy.refuse(403, code)
    with pytest.raises(StoreRefused, match=complaint):
        open_objects(bucket, tuning=QUICK)
    assert proxy.hits == 1


@pytest.mark.parametrize(
    ("root", "complaint"),
    [
        ("s3://", "'' is no bucket name"),
        ("s3:///folder", "'' is no bucket name"),
        ("s3://Bucket/x", "'Bucket' is no bucket name"),
        ("s3://bucket/a b", "'a b' cannot be a folder"),
        ("s3://bucket/../x", "'..' cannot be a folder"),
        ("s3://bucket/x?versionId=1", "write s3://bucket/prefix, nothing else"),
        ("s3://bucket/x#y", "nothing else"),
    ],
)
def test_addresses_that_name_no_store(root: str, complaint: str):
    with pytest.raises(StoreUnsupported, match=complaint):
        open_store(root)


def test_a_secret_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(StoreUnsupported, match="holds a user or password") as refused:
        open_store("s3://AKIAKEY:topsecret@bucket/x")
    assert "topsecret" not in str(refused.value)


def test_addresses():
    address = S3Address.parse("s3://bucket//a/b/")
    assert (address.bucket, address.prefix, address.uri) == ("bucket", "a/b", "s3://bucket/a/b")
    assert (address.key("runs", "r"), address.uri_of("a/x")) == ("a/b/runs/r", "s3://bucket/a/x")
    root = S3Address.parse("s3://bucket")
    assert (root.uri, root.key("runs")) == ("s3://bucket", "runs")
