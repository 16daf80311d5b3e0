"""The one seam through which every call to S3 goes, and the addresses and errors of stores on S3.

Tests put an implementation of their own here to make the n-th call fail, or to let the process "die" around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from infra.storage.filesystem import StoreUnsupported

SCHEME = "s3"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_FOLDER = re.compile(r"[A-Za-z0-9._=+-]{1,200}")


class StoreUnavailable(RuntimeError):
    """S3 does not answer, or fails again and again; the same call may succeed later."""


class StoreRefused(StoreUnsupported):
    """S3 answers that this bucket, or what is asked of it, is not for us; the same call would fail again."""


@dataclass(frozen=True)
class Found:
    """The content of a small object, and the ETag that tells this version of it from others.

    Where S3 encrypts with a key of the user's own, an ETag is no md5, although it may look like one.
    """

    content: bytes
    etag: str
    etag_is_md5: bool = True


@dataclass(frozen=True)
class Entry:
    """An object as a listing shows it."""

    key: str
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True)
class Pending:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    started: datetime


@dataclass(frozen=True)
class DownloadRequest:
    """An object to be downloaded, the size that it must have, and the file that is to be made of it."""

    key: str
    size: int
    path: Path


@dataclass(frozen=True)
class DownloadResult:
    """What a download met: the object's size (None: there is none) and, if it was the wanted one, its sha256."""

    size: int | None
    sha256: str | None = None


class Objects(Protocol):
    """The calls to one bucket. Each either happens or raises StoreUnavailable or StoreRefused.

    After StoreUnavailable it is not known whether a call has happened, or will yet.
    """

    @property
    def bucket(self) -> str:
        """The bucket's name."""

    def read(self, key: str) -> Found | None:
        """A small object, or None."""

    def create(self, key: str, content: bytes) -> str | None:
        """Write an object unless there is one: its ETag, or None if there is another one.

        It counts as ours if its content is what we wrote, so `content` must be unique: let it carry a nonce.
        """

    def replace(self, key: str, content: bytes, etag: str) -> str | None:
        """Write over the version with this ETag: the new ETag, or None if it was changed or removed meanwhile.

        As with `create`, `content` must be unique.
        """

    def write(self, key: str, content: bytes) -> None:
        """Write a small object, whatever is there."""

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; that some are absent is no error."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every object whose key begins with `prefix`, sorted by key."""

    def folders(self, prefix: str) -> list[str]:
        """The names of the next level below `prefix` (which ends with a slash, or is empty) that hold objects."""

    def copy(self, source: str, target: str) -> bool:
        """Copy an object within the bucket, without its bytes passing through here; False if there is none."""

    def upload(self, files: Mapping[str, Path]) -> None:
        """Write files as the objects of these keys, several at a time, large ones in parts."""

    def download(self, wanted: Iterable[DownloadRequest]) -> dict[str, DownloadResult]:
        """Make files of objects, several at a time, large ones in parts; what came, by key.

        The caller compares the sha256: bytes that were changed on the way arrive without an error.
        """

    def pending(self, prefix: str) -> Iterator[Pending]:
        """The unfinished multipart uploads of keys that begin with `prefix`."""

    def abandon(self, pending: Pending) -> None:
        """Abort an unfinished multipart upload; that it is gone already is no error."""


@dataclass(frozen=True)
class S3Address:
    """Where a store is: a bucket, and the folder in it below which everything lies ("" for the bucket itself)."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, root: str) -> S3Address:
        """The address that `s3://bucket/prefix` names."""
        address = urlsplit(root)
        if "@" in address.netloc or address.password is not None:
            # The address is not repeated here: a secret may be in it.
            raise StoreUnsupported(
                "the store's s3:// address holds a user or password: write s3://bucket/prefix, and give the "
                "credentials the way boto3 takes them (AWS_PROFILE, AWS_ACCESS_KEY_ID, an instance's role)"
            )
        if address.scheme != SCHEME or address.query or address.fragment:
            raise StoreUnsupported(f"store {root!r}: write s3://bucket/prefix, nothing else")
        if _BUCKET.fullmatch(address.netloc) is None or ".." in address.netloc:
            raise StoreUnsupported(
                f"store {root!r}: {address.netloc!r} is no bucket name (3 to 63 lower-case letters, digits, dots and "
                "dashes): write s3://bucket/prefix"
            )
        folders = [name for name in address.path.strip("/").split("/") if name]
        for name in folders:
            if _FOLDER.fullmatch(name) is None or name in (".", ".."):
                raise StoreUnsupported(
                    f"store {root!r}: {name!r} cannot be a folder of a store: use letters, digits and ._=+- in a prefix"
                )
        return cls(address.netloc, "/".join(folders))

    @property
    def uri(self) -> str:
        """The one spelling of this address."""
        return self.uri_of(self.prefix).rstrip("/")

    def key(self, *names: str) -> str:
        """The key of what these names lead to, below the prefix."""
        return "/".join(name for name in (self.prefix, *names) if name)

    def uri_of(self, key: str) -> str:
        """The uri of an object, or of what lies below a prefix."""
        return f"{SCHEME}://{self.bucket}/{key}"
