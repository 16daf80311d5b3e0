"""Calls to an S3 server that goes away: they wait for it, and come to the same as if it had been there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import open_store
from infra.runs.lease import Heartbeat
from infra.runs.s3_lease import acquire_lease
from infra.storage.client import Tuning, open_objects
from infra.storage.objects import DownloadRequest, Entry, Objects, StoreUnavailable
from infra.storage.outage import Outage, at_once, under_way
from infra.storage.telling import messages_to
from infra.storage.waiting_client import WaitingObjects
from tests.infra.storage.s3.fault_proxy import FaultProxy, Message
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.infra.storage.s3.s3_server import S3Server
from tests.waiting import LONG_S, until

TUNING = Tuning(connect_s=30, read_s=60, attempts=1)
AWAY_S = 1.5
SOON_S = 120.0
"""Far below the timeout of 15 minutes, and enough for a machine that is ten times slower than alone."""
ROOT = Path(__file__).parents[4]
INTERRUPTED = """
import sys
from functools import partial
from infra.storage.client import Tuning, open_objects
from infra.storage.objects import StoreUnavailable
from infra.storage.telling import messages_to
from infra.storage.parallel import parallel_map
objects = open_objects(sys.argv[1], tuning=Tuning(connect_s=30, read_s=60, attempts=1))
say = partial(print, flush=True)
say("ready")
sys.stdin.readline()
with messages_to(say):
    try:
        parallel_map(objects.read, ["a", "b", "c", "d"], threads=int(sys.argv[2]))
    except KeyboardInterrupt:
        say("interrupted")
    try:
        objects.write("released", b"x")
    except StoreUnavailable:
        say("released")
"""
TIMEOUT = "PPOFLOW_STORE_TIMEOUT_S"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks whether the server is there again; the programs of this file keep their own."""
    monkeypatch.setattr("infra.storage.outage.PAUSE_S", 0.2)


@pytest.fixture
def proxy(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of the server, and what boto3 finds."""
    proxy = FaultProxy(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
    yield proxy
    proxy.close()


@pytest.fixture
def objects(proxy: FaultProxy, bucket: str) -> Objects:
    return open_objects(bucket, tuning=TUNING)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What was told of outages."""
    texts: list[str] = []
    with messages_to(texts.append):
        yield texts


def all_requests(request: Message) -> bool:
    return True


def test_every_call_waits_and_happens(
    objects: Objects, proxy: FaultProxy, s3_server: S3Server, said: list[str], tmp_path: Path
) -> None:
    etag = objects.create("replaced", b"one")
    assert etag is not None
    for key in ("read", "removed", "copied", "down"):
        objects.write(key, b"x")
    (tmp_path / "up").write_bytes(b"up")
    s3_server.client.create_multipart_upload(Bucket=objects.bucket, Key="begun")
    (begun,) = objects.pending("")
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: objects.read("read").content,  # type: ignore[union-attr]
        "create": lambda: bool(objects.create("created", b"mine")),
        "replace": lambda: bool(objects.replace("replaced", b"two", etag)),
        "write": lambda: objects.write("written", b"x"),
        "remove": lambda: objects.remove(["removed"]),
        "entries": lambda: [entry.key for entry in objects.entries("rea")],
        "folders": lambda: objects.folders("absent/"),
        "copy": lambda: objects.copy("copied", "copy"),
        "upload": lambda: objects.upload({"uploaded": tmp_path / "up"}),
        "download": lambda: objects.download([DownloadRequest("down", 1, tmp_path / "down")])["down"].size,
        "pending": lambda: isinstance(list(objects.pending("absent")), list),
        "abandon": lambda: objects.abandon(begun),
    }
    proxy.go_away()
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = {name: pool.submit(call) for name, call in calls.items()}
        until(lambda: bool(said))
        time.sleep(AWAY_S)
        assert not any(future.done() for future in futures.values())
        proxy.come_back()
    assert {name: future.result() for name, future in futures.items()} == {
        **dict.fromkeys(calls),
        **{"read": b"x", "create": True, "replace": True, "entries": ["read"], "folders": []},
        **{"copy": True, "download": 1, "pending": True},
    }
    keys = {entry.key for entry in objects.entries("")}
    assert keys == {"read", "created", "replaced", "written", "copied", "copy", "uploaded", "down"}
    assert list(objects.pending("")) == []
    place = proxy.uri
    assert said[0] == f"S3 at {place} does not answer: waiting for it for up to 15 min"
    assert said[1].startswith(f"S3 at {place} answers again, after ")
    assert len(said) == 2


def test_what_was_created_before_the_outage_is_still_ours(objects: Objects, proxy: FaultProxy) -> None:
    proxy.inject("reset after", all_requests, times=2)  # the put, and the look whether it has happened
    etag = objects.create("k", b"one")
    assert proxy.hits == 2
    assert etag is not None
    proxy.inject("reset after", all_requests, times=2)
    assert objects.replace("k", b"two", etag) is not None
    proxy.inject("reset after", all_requests, times=2)
    assert objects.create("k", b"three") is None


def test_beyond_its_timeout_a_call_fails_and_those_after_it_do_not_wait(
    proxy: FaultProxy, bucket: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT, "3")
    objects = open_objects(bucket, tuning=TUNING)
    proxy.go_away()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=rf"'k' in bucket.*\(waited for 3 s\); {TIMEOUT}=SECONDS"):
        objects.write("k", b"x")
    assert 3 <= time.monotonic() - began < 3 + SOON_S
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(StoreUnavailable):
            objects.read("k")
    assert time.monotonic() - began < SOON_S
    assert len(said) == 1
    proxy.come_back()
    again = open_objects(bucket, tuning=TUNING)  # the next run in this process
    proxy.away_for(1)
    again.write("k", b"x")


@pytest.mark.thorough
def test_a_server_that_has_never_answered_is_not_waited_for_for_long(
    bucket: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:9")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no-such-host.*waited for 15 s\): is .* the right address"):
        open_store(f"s3://{bucket}/x", cache=tmp_path / "cache")
    assert time.monotonic() - began < SOON_S
    assert said == ["S3 at http://no-such-host.invalid:9 does not answer: waiting for it for up to 15 s"]


def test_one_that_others_have_used_is_waited_for_as_in_the_middle_of_work(
    proxy: FaultProxy, bucket: str, said: list[str]
) -> None:
    proxy.go_away()
    with under_way(), messages_to(lambda text: back(proxy, text, said)):
        open_objects(bucket, tuning=TUNING).write("k", b"x")
    assert said[0].endswith("waiting for it for up to 15 min")


def back(proxy: FaultProxy, text: str, said: list[str]) -> None:
    """The server is there again as soon as it is missed."""
    if not said:
        proxy.come_back()
    said.append(text)


def test_what_need_not_wait_does_not(objects: Objects, proxy: FaultProxy, said: list[str]) -> None:
    proxy.go_away()
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(StoreUnavailable), at_once():
            objects.write("beat", b"x")
    assert time.monotonic() - began < SOON_S
    assert said == []
    proxy.come_back()
    with at_once():
        objects.write("beat", b"x")


@pytest.mark.parametrize("threads", ["1", "4"])
def test_an_interrupt_ends_every_wait(proxy: FaultProxy, bucket: str, threads: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED, bucket, threads]
    with subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        proxy.go_away()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert "does not answer" in process.stdout.readline()
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < LONG_S:
            # Python drops an interrupt that comes while it calls a destructor.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        process.kill()  # where it does not end, the test does
        assert process.stdout.read() == "interrupted\nreleased\n"


def test_a_heartbeat_goes_on_after_an_outage_and_never_holds_up_the_end(
    objects: Objects, proxy: FaultProxy, bucket: str, said: list[str]
) -> None:
    lease = acquire_lease(f"s3://{bucket}", "r", objects=objects)
    lost: list[bool] = []

    def beats() -> int:
        return sum(line.startswith("PUT") and "heartbeat" in line for line in proxy.requests)

    with Heartbeat(lease, on_lost=lambda: lost.append(True), every_s=0.1):
        until(lambda: beats() > 1)
        proxy.go_away()
        time.sleep(1)
        before = beats()
        proxy.come_back()
        until(lambda: beats() > before + 1)
        proxy.go_away()
        time.sleep(0.5)
        began = time.monotonic()
    assert time.monotonic() - began < SOON_S
    assert (said, lost) == ([], [])
    with pytest.raises(StoreUnavailable):
        lease.release()
    assert time.monotonic() - began < SOON_S
    proxy.come_back()
    lease.release()
    assert lease.lost


class Breaking(MemoryObjects):
    """A bucket whose listings break off before every second entry, once."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_at: list[str] = []

    def entries(self, prefix: str) -> Iterator[Entry]:
        for number, entry in enumerate(super().entries(prefix)):
            if number and number % 2 == 0 and entry.key not in self.broken_at:
                self.broken_at.append(entry.key)
                raise StoreUnavailable("it breaks off")
            yield entry


def test_a_listing_that_breaks_off_goes_on(said: list[str]) -> None:
    real = Breaking()
    keys = ["k0", "k1", "k2", "k3", "k4", "k\U0001f600"]
    for key in keys:
        real.write(key, b"x")
    waiting = WaitingObjects(real, Outage("S3 in memory"), lambda: None, 60)
    assert [entry.key for entry in waiting.entries("k")] == keys
    assert real.broken_at == ["k2", "k4"]
