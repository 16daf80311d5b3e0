"""An S3 server for tests: a child process, a bucket in it, and what boto3 must find in the environment to reach it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3

from infra.storage.client import BotoObjects, Tuning, configuration

PROGRAM = Path(__file__).with_name("s3_program.py")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests-secret", "AWS_DEFAULT_REGION": "us-east-1"}
# Whatever the machine has of its own must not be found.
ISOLATION = {
    "AWS_CONFIG_FILE": "/nonexistent/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
    "AWS_EC2_METADATA_DISABLED": "true",
}
FOREIGN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_ROLE_ARN")


class S3Server:
    """The server of `s3_program`; it ends with `stop`, and with the process that started it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # S3 takes no parts below 5 MiB; tests of large files want small ones.
            env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "256"},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.uri = f"http://127.0.0.1:{self.port}"
        self._numbers = itertools.count(1)
        self.client = self._plain_client()
        """A boto3 client, for what tests do behind the store's back."""

    def environment(self, uri: str | None = None) -> dict[str, str]:
        """The variables with which boto3 finds this server, or a proxy in front of it."""
        return {**ISOLATION, **CREDENTIALS, "AWS_ENDPOINT_URL": uri or self.uri}

    def _plain_client(self, uri: str | None = None, tuning: Tuning | None = None) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=uri or self.uri,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            config=configuration(tuning or Tuning()),
        )

    def objects(self, bucket: str) -> BotoObjects:
        """The calls to a bucket; opening one anew takes a tenth of a second."""
        return BotoObjects(self.client, bucket, Tuning())

    def objects_through(self, uri: str, bucket: str, tuning: Tuning) -> BotoObjects:
        """The calls to a bucket by way of a proxy."""
        return BotoObjects(self._plain_client(uri, tuning), bucket, tuning)

    def make_bucket(self) -> str:
        """A new empty bucket."""
        name = f"tests-{next(self._numbers)}"
        self.client.create_bucket(Bucket=name)
        return name

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.communicate()
