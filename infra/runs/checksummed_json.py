"""JSON documents with a checksum: the sha256 of the content and of its own name; reading checks it and takes it off.

Not-a-number and infinity are kept (as Python's JSON spells them), for a metric may be either.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from infra.artifacts.manifest import sha256_of
from infra.storage.filesystem import FileSystem, read_whole

RECORD_FORMAT = 1  # any later one, too, has a sha256 over name and record: so it cannot be taken for a damaged one
CHECKSUM = "seal"
"""The key of a document's checksum."""
REMEMBERED_BYTES = 16384
"""A run reads its records again and again: the checksums of documents up to this size are kept, by name and content.
The one document that grows with a run, its head on S3, is another after each change; copies of it would fill memory."""
NO_FILE_ERRORS = frozenset({errno.EISDIR, errno.ELOOP})
"""What lies in the place of a document is none, however often it is read."""


class RecordError(RuntimeError):
    """Something is wrong with a run's records."""


class RecordExists(RecordError):
    """The record is there already; records are written once."""


class RecordMissing(RecordError):
    """There is no such record."""


class RecordCorrupted(RecordError):
    """A record is not what was written."""


class RecordFormatTooNew(RecordError):
    """A newer version wrote this record, and this one cannot read it."""


def remedy_for(run: str, document: int | str = "spec") -> str:
    """What helps where a document of a run is lost or damaged: a record (by its iteration), the spec, or a note."""
    if document == "spec":
        return f"`ppoflow fsck {run} --repair` writes it again from the run's first record; if it has none, remove it"
    if document == "rollbacks":
        return (
            "put it back from a copy: the learning rates of the iterations after it depend on it. Or move it away: "
            "the next start writes it again from the run's records"
        )
    if document == "last":
        return f"`ppoflow fsck {run} --repair` writes it again from the run's records, as the next iteration does"
    if document == "reruns":
        return "move it away: a rerun that it tells of is not finished then, and the run goes on from its last record"
    if document == "changes":
        return "move it away: the run goes on with the settings of its last record then; give others by --set again"
    if document == "divergences":
        return "move it away: it is of an iteration that is no part of the run, and nothing depends on it"
    if document == "tracking":
        return "move it away: the run gets a new MLflow run then, with all of its curves"
    return (
        f"`ppoflow fsck {run} --repair` takes iteration {document} and those after it out of the run, and the next "
        "start makes them again, from the stages that are still in the store"
    )


def remedy_for_name(run: str, name: str) -> str:
    """The same by the name under which a document is written, `spec.json` or `iterations/000012…`."""
    kind, _, rest = name.removesuffix(".json").partition("/")
    return remedy_for(run, int(rest.partition("-")[0])) if kind == "iterations" else remedy_for(run, kind)


def encode(name: str, document: Mapping[str, Any]) -> bytes:
    """The one spelling of a document under this name."""
    if CHECKSUM in document:
        raise ValueError(f"a record cannot have a key {CHECKSUM!r} of its own: the store adds it")
    plain = json.loads(json.dumps(dict(document)))
    return _spelled(plain, sha256_of({"name": name, "record": plain}))


def _checked(name: str, content: bytes) -> tuple[str, bool]:
    """The checksum of a document under its name, and whether these bytes are its one spelling."""
    document = json.loads(content)
    del document[CHECKSUM]
    checksum = sha256_of({"name": name, "record": document})
    return checksum, _spelled(document, checksum) == content


@lru_cache(maxsize=1024)
def _checked_once(name: str, content: bytes) -> tuple[str, bool]:
    return _checked(name, content)


def _spelled(plain: dict[str, Any], checksum: str) -> bytes:
    stamp = {"format": RECORD_FORMAT, "sha256": checksum}
    return (json.dumps({**plain, CHECKSUM: stamp}, indent=1) + "\n").encode()


def read_checksummed(files: FileSystem, path: Path, name: str, *, remedy: str) -> dict[str, Any] | None:
    """The document at `path` that was written under `name`, or None; RecordCorrupted or RecordFormatTooNew."""
    if files.status(path) is None:
        return None
    try:
        content = read_whole(files, path)
    except FileNotFoundError as error:
        status = files.status(path)
        if status is None or status.kind != "link":
            return None  # its writer has taken it out of the run since
        raise RecordCorrupted(f"{path} is a link to what is not there: {remedy}") from error
    except OSError as error:
        if error.errno not in NO_FILE_ERRORS:
            raise
        raise RecordCorrupted(f"{path} is no file ({error.strerror}): {remedy}") from error
    return decode(path, name, content, remedy=remedy)


def decode(place: Path | str, name: str, content: bytes, *, remedy: str) -> dict[str, Any]:
    """The document that was written under `name`, read from `place`; RecordCorrupted or RecordFormatTooNew."""

    def corrupted(complaint: str) -> RecordCorrupted:
        return RecordCorrupted(f"{place} {complaint}: {remedy}")

    try:
        document = json.loads(content)
        stamp = document.pop(CHECKSUM, None) if isinstance(document, dict) else None
        if not isinstance(stamp, dict):
            raise corrupted("carries no checksum")
        checksum, as_written = (_checked_once if len(content) <= REMEMBERED_BYTES else _checked)(name, content)
    except (ValueError, RecursionError) as error:
        raise corrupted(f"is no JSON ({error})") from error
    stated, holds = stamp.get("format"), stamp.get("sha256") == checksum
    if isinstance(stated, int) and stated > RECORD_FORMAT and holds:
        raise RecordFormatTooNew(
            f"{place} has record format {stated}, this version reads up to format {RECORD_FORMAT}: "
            f"use a ppoflow that reads record format {stated}"
        )
    if not as_written:
        raise corrupted(f"does not have its own sha256 {stamp.get('sha256')}")
    return document
