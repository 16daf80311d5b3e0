"""Calls to S3 through boto3, with every timeout, retry and checksum set on purpose.

- Four attempts at each call, five seconds to connect, thirty without a byte: with boto3's own sixty seconds a run hangs
  over one bad connection. A server that does not answer after that is waited for: see `infra.storage.waiting_client`.
- Each body that is sent is signed with its sha256, also over https: every S3 server compares that, also one that does
  not know S3's newer checksum headers. What is read is checked by the caller, who knows its sha256.
- Credentials, region and endpoint come from boto3's own chain and from nowhere else.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.settings import Settings
from infra.storage.error_translation import (
    ABSENT,
    ARRIVED_WRONG,
    CREDENTIAL_ERRORS,
    NO_SUCH_BUCKET,
    NOT_IMPLEMENTED,
    code_of,
    read_answer,
    status_of,
    translate_errors,
)
from infra.storage.objects import DownloadRequest, DownloadResult, Entry, Found, Objects, Pending, StoreRefused
from infra.storage.outage import outage_of, timeout_at_start
from infra.storage.transfer import Transfer
from infra.storage.waiting_client import WaitingObjects

# Conditional puts: somebody was faster, or is at it right now, or the object is gone.
LOST = frozenset({404, 409, 412})
REMOVED_AT_ONCE = 1000
PLAIN = "AES256"
"""The encryption by S3's own key, with which ETags stay md5s."""
CONFLICTS = 10
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True)
class Tuning:
    """Timeouts of calls to S3, and how large files are cut.

    `part_bytes` is both the size of a part and that above which a file is sent in parts; `threads` is how many calls
    are in flight at once when files are moved.
    """

    connect_s: float = 5.0
    read_s: float = 30.0
    attempts: int = 4
    threads: int = 8
    part_bytes: int = 32 * 2**20


PROBE = Tuning(read_s=5.0, attempts=1)


def open_objects(bucket: str, *, tuning: Tuning | None = None) -> Objects:
    """Open a bucket: StoreRefused, now and not in the middle of work, where it or the credentials are not right.

    Calls wait for a server that does not answer; opening does so for a short time, unless it has answered before.
    """
    chosen = tuning or Tuning()
    with translate_errors(bucket, "open", ""):
        session = boto3.session.Session()
        try:
            client = session.client("s3", config=configuration(chosen))
        except BotoCoreError:
            raise
        except ValueError as error:
            raise StoreRefused(f"{error}: write AWS_ENDPOINT_URL as http://HOST:PORT or https://HOST") from None
    outage = outage_of(server_of(client.meta.endpoint_url))
    outage.open()
    timeout_s = Settings().store_timeout_s
    objects = WaitingObjects(BotoObjects(client, bucket, chosen), outage, prober(session, bucket), timeout_s)
    objects.until_answered(lambda: look(client, bucket), timeout_at_start(outage, timeout_s))
    return objects


def look(client: Any, bucket: str) -> None:
    """Ask for as little as there is."""
    with translate_errors(bucket, "open", ""):
        client.list_objects_v2(Bucket=bucket, MaxKeys=1)


def prober(session: boto3.session.Session, bucket: str) -> Callable[[], None]:
    """A function that asks once, and waits for the answer for a few seconds only."""

    @cache
    def client() -> Any:
        return session.client("s3", config=configuration(PROBE))

    return lambda: look(client(), bucket)


def server_of(endpoint: str) -> str:
    """How messages name a server: by its address without any password in it."""
    return f"S3 at {endpoint.rpartition('@')[2].removeprefix('https://')}"


def configuration(tuning: Tuning) -> Config:
    """boto3's settings of timeouts and checksums."""
    return Config(
        connect_timeout=tuning.connect_s,
        read_timeout=tuning.read_s,
        retries={"mode": "standard", "total_max_attempts": tuning.attempts},
        max_pool_connections=2 * tuning.threads,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": True},
        user_agent_extra="ppoflow",
    )


class BotoObjects:
    """`Objects` through boto3; safe for several threads."""

    def __init__(self, client: Any, bucket: str, tuning: Tuning) -> None:
        self._s3 = client
        self._bucket = bucket
        self._tuning = tuning
        self._copying = TransferConfig(max_concurrency=tuning.threads)
        self._transfer = Transfer(client, bucket, tuning.attempts, tuning.threads, tuning.part_bytes)

    @property
    def bucket(self) -> str:
        return self._bucket

    def read(self, key: str) -> Found | None:
        with translate_errors(self._bucket, "read", key):
            return read_answer(partial(self._ask_for, key), _found, self._tuning.attempts)

    def _ask_for(self, key: str) -> Any:
        """The answer with an object; None where there is none."""
        try:
            return self._s3.get_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if code_of(error) in ABSENT:
                return None
            raise

    def create(self, key: str, content: bytes) -> str | None:
        return self._settle(key, content, None)

    def replace(self, key: str, content: bytes, etag: str) -> str | None:
        return self._settle(key, content, etag)

    def _settle(self, key: str, content: bytes, etag: str | None) -> str | None:
        """A conditional put; where the answer leaves it open what happened, what is there now decides.

        A "no" may be the answer to boto3's own second attempt, while the first one had already happened.
        """
        # Quotes belong to an ETag, but Ceph compares without them, and the others take both.
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        complaint: ClientError | BotoCoreError
        for attempt in range(1, CONFLICTS + 1):
            try:
                answer = self._s3.put_object(Bucket=self._bucket, Key=key, Body=content, **condition)
                return _bare(answer["ETag"])
            except ClientError as error:
                lost = status_of(error) in LOST and code_of(error) != NO_SUCH_BUCKET
                lost = lost or code_of(error) in ARRIVED_WRONG
                if not lost and (status_of(error) < 500 or status_of(error) == NOT_IMPLEMENTED):
                    with translate_errors(self._bucket, "write", key):
                        raise
                complaint = error
            except BotoCoreError as error:
                lost, complaint = False, error
                if isinstance(error, CREDENTIAL_ERRORS):
                    with translate_errors(self._bucket, "write", key):
                        raise
            present = self.read(key)
            if present is not None and present.content == content:
                return present.etag
            if (None if present is None else present.etag) != etag:
                return None
            if not lost or attempt == CONFLICTS:
                with translate_errors(self._bucket, "write", key):
                    raise complaint
            time.sleep(_pause(attempt))
        raise AssertionError("unreachable")

    def write(self, key: str, content: bytes) -> None:
        with translate_errors(self._bucket, "write", key):
            self._transfer.again(lambda: self._s3.put_object(Bucket=self._bucket, Key=key, Body=content))

    def remove(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for start in range(0, len(names), REMOVED_AT_ONCE):
            batch = names[start : start + REMOVED_AT_ONCE]
            with translate_errors(self._bucket, "remove", batch[0]):
                answer = self._s3.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in batch], "Quiet": True}
                )
                for error in answer.get("Errors", []):
                    if error["Code"] not in ABSENT:
                        raise ClientError({"Error": error}, "DeleteObjects")

    def entries(self, prefix: str) -> Iterator[Entry]:
        with translate_errors(self._bucket, "list", prefix):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for found in page.get("Contents", []):
                    yield Entry(found["Key"], found["Size"], _bare(found["ETag"]), found["LastModified"])

    def folders(self, prefix: str) -> list[str]:
        with translate_errors(self._bucket, "list", prefix):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, Delimiter="/"
            )
            found = [common["Prefix"] for page in pages for common in page.get("CommonPrefixes", [])]
        return [name for place in found if (name := place.removeprefix(prefix).rstrip("/"))]

    def copy(self, source: str, target: str) -> bool:
        with translate_errors(self._bucket, "copy", source):
            try:
                self._s3.copy({"Bucket": self._bucket, "Key": source}, self._bucket, target, Config=self._copying)
            except ClientError as error:
                if code_of(error) not in ABSENT:
                    raise
                return False
        return True

    def upload(self, files: Mapping[str, Path]) -> None:
        self._transfer.upload(files)

    def download(self, wanted: Iterable[DownloadRequest]) -> dict[str, DownloadResult]:
        return self._transfer.download(list(wanted))

    def pending(self, prefix: str) -> Iterator[Pending]:
        with translate_errors(self._bucket, "list", prefix):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for found in page.get("Uploads", []):
                    yield Pending(found["Key"], found["UploadId"], found["Initiated"])

    def abandon(self, pending: Pending) -> None:
        self._transfer.abort(pending.key, pending.upload_id)


def _found(answer: Mapping[str, Any]) -> Found:
    own_key = "SSECustomerAlgorithm" in answer
    md5 = not own_key and answer.get("ServerSideEncryption", PLAIN) == PLAIN
    return Found(answer["Body"].read(), _bare(answer["ETag"]), md5)


def _bare(etag: str) -> str:
    return etag.strip('"')


def _pause(attempt: int) -> float:
    return random.uniform(0, min(LONGEST_PAUSE_S, 0.05 * 2**attempt))
