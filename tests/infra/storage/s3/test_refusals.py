"""What a server of S3, or boto3, would answer again: said at once and with the remedy, and never waited for."""

from __future__ import annotations

import http.server
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.backend import acquire_lease, open_log
from infra.storage.client import Tuning, open_objects
from infra.storage.conditions import require_conditional_puts
from infra.storage.objects import StoreRefused, StoreUnavailable
from tests.http_server import serving
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.infra.storage.s3.s3_server import FOREIGN, S3Server

QUICK = Tuning(connect_s=2, read_s=2, attempts=2)
EMPTY = b"<ListBucketResult><Name>b</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


@dataclass
class Answers:
    """How a server answers: objects by path; which conditions it ignores; an error for conditional puts, or for all."""

    objects: dict[str, bytes] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    error: tuple[int, str] | None = None
    conditional: bool = True

    def put(self, path: str, body: bytes, conditions: dict[str, str]) -> tuple[int, str]:
        if self.error and (conditions or not self.conditional):
            return self.error
        kept = {name: value for name, value in conditions.items() if name not in self.ignored}
        if ("If-None-Match" in kept and path in self.objects) or "If-Match" in kept:
            return 412, "PreconditionFailed"
        self.objects[path] = body
        return 200, ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> Iterator[Answers]:
    """One that boto3 finds, with a bucket `bucket`."""
    answers = Answers()
    with serving(handler_of(answers)) as uri:
        for name in FOREIGN:
            monkeypatch.delenv(name, raising=False)
        for name, value in s3_server.environment(uri).items():
            monkeypatch.setenv(name, value)
        yield answers


def handler_of(answers: Answers) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"abc"')
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if "list-type" in self.path:
                self.reply(200, EMPTY)
            elif path in answers.objects:
                self.reply(200, answers.objects[path])
            else:
                self.reply(404, error("NoSuchKey"))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            conditions = {name: self.headers[name] for name in ("If-None-Match", "If-Match") if self.headers.get(name)}
            status, code = answers.put(self.path.partition("?")[0], body, conditions)
            self.reply(status, error(code) if code else b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answers.objects.clear()  # only removals post anything
            self.reply(200, b"<DeleteResult/>")

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>not here</Message></Error>".encode()


@pytest.mark.parametrize(
    ("ignored", "named"),
    [
        (("If-None-Match",), "If-None-Match:"),
        (("If-Match",), "If-Match:"),
        (("If-None-Match", "If-Match"), "If-None-Match and If-Match:"),
    ],
)
def test_where_conditions_of_puts_are_ignored_nobody_becomes_a_writer(server, ignored, named):
    server.ignored = ignored
    with pytest.raises(StoreRefused, match=rf"wrote over an object in spite of {named} the server of bucket 'bucket'"):
        acquire_lease("s3://bucket/p", "r")
    assert server.objects == {}, "nothing of the trial is left"


@pytest.mark.parametrize("answer", [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_where_conditions_of_puts_are_refused_nobody_waits(server, answer):
    server.error = answer
    with pytest.raises(StoreRefused, match=rf"refuses to write .*{answer[1]}.*must know conditional puts"):
        acquire_lease("s3://bucket/p", "r")
    with pytest.raises(StoreRefused, match=answer[1]):
        open_log("s3://bucket/p", "promotions").create("000001.json", b"one")


def test_who_may_not_write_is_told_that_alone(server):
    server.error, server.conditional = (403, "AccessDenied"), False
    with pytest.raises(StoreRefused, match="does not let these credentials write") as refused:
        acquire_lease("s3://bucket/p", "r")
    assert "conditional" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (403, "QuotaExceeded", r"refuses to open bucket .*\(QuotaExceeded: .*bucket's settings or quota"),
        (400, "InvalidBucketName", "refuses to open"),
        (403, "RequestTimeTooSkewed", "finds this machine's clock wrong .*NTP"),
        (400, "TokenRefreshRequired", "does not accept the credentials"),
    ],
)
def test_what_would_be_answered_again_is_refused(bucket, proxy, monkeypatch, status, code, complaint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
    proxy.refuse(status, code)
    with pytest.raises(StoreRefused, match=complaint):
        open_objects(bucket, tuning=QUICK)
    assert proxy.hits == 1


@pytest.mark.parametrize(
    ("status", "code"), [(400, "RequestTimeout"), (503, "SlowDown"), (409, "OperationAborted"), (407, "407")]
)
def test_what_may_pass_is_waited_for(bucket, proxy, monkeypatch, status, code):
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.uri)
    monkeypatch.setattr("infra.storage.outage.START_S", 0.1)
    proxy.refuse(status, code)
    with pytest.raises(StoreUnavailable, match="waited for"):
        open_objects(bucket, tuning=QUICK)


def no_scheme(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:7480")


def no_region(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu west/1")


def sso(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A profile of somebody who has not logged in today."""
    profile(monkeypatch, folder, "sso_start_url = https://x.example/start\nsso_region = us-east-1\n"
            "sso_account_id = 1\nsso_role_name = r\n")  # fmt: skip


def source_profile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    profile(monkeypatch, folder, "role_arn = arn:aws:iam::1:role/r\nsource_profile = absent\n")


def no_config(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    profile(monkeypatch, folder, "this is no setting\n")


def profile(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "config").write_text(f"[profile p]\nregion = us-east-1\n{text}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_PROFILE", "p")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (no_scheme, "Invalid endpoint: localhost:7480: write AWS_ENDPOINT_URL as http://HOST:PORT"),
        (no_region, "needs a region .*set AWS_DEFAULT_REGION"),
        (sso, "no usable credentials .*aws sso login"),
        (source_profile, "no usable credentials .*absent"),
        (no_config, "no usable credentials .*config"),
    ],
)
def test_boto3s_own_refusals_are_no_outage(
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broken: Callable[[pytest.MonkeyPatch, Path], None],
    complaint: str,
):
    broken(monkeypatch, tmp_path)
    with pytest.raises(StoreRefused, match=complaint):
        open_objects(bucket, tuning=QUICK)


class Collected(MemoryObjects):
    """A bucket whose collector takes an object away at once, a few times."""

    times_left = 3

    def create(self, key: str, content: bytes) -> str | None:
        etag = super().create(key, content)
        if self.times_left:
            self.times_left -= 1
            self.remove([key])
        return etag


def test_a_collector_beside_the_trial_is_not_taken_for_a_server_that_ignores_conditions():
    objects = Collected()
    require_conditional_puts(objects, "trial")
    assert (objects.times_left, objects.content) == (0, {})
