"""Runs in a bucket in memory: made-up processes, one after the other, each of which finds the others dead."""

from __future__ import annotations

from infra.artifacts.s3_envelope import Envelope, envelope_key, read_version, upload_prefix
from infra.gc.s3_collector import S3Collector
from infra.runs.names import NOTES
from infra.runs.s3_lease import S3Lease, acquire_lease
from infra.runs.s3_records import S3Records
from infra.runs.s3_runs import S3Runs
from infra.storage.objects import Objects, S3Address
from tests.infra.runs.leases import somebody

ROOT = "s3://memory/store"
ADDRESS = S3Address.parse(ROOT)
Name = tuple[str, str]


def successor(objects: Objects, run: str = "r") -> S3Lease:
    """The lease of a new process that finds every other process dead."""
    return acquire_lease(ROOT, run, objects=objects, identity=somebody(), alive=lambda _: False)


def records_of(objects: Objects, run: str = "r", lease: S3Lease | None = None) -> S3Records:
    """A run's records."""
    return S3Runs(ADDRESS, objects).records(run, lease=lease)


def writer(objects: Objects, run: str = "r") -> S3Records:
    """A run's records, open for writing by a new process that finds every other process dead."""
    return records_of(objects, run, successor(objects, run))


def state(objects: Objects, run: str = "r") -> tuple[object, ...]:
    """All that a reader finds of a run."""
    records = records_of(objects, run)
    return records.read_spec(), records.iterations(), records.all(), *(records.notes(kind) for kind in NOTES)


def collector_on(objects: Objects) -> S3Collector:
    """The collector of the store."""
    return S3Collector(ADDRESS, objects)


def put(objects: Objects, name: Name, upload: str = "0" * 32) -> None:
    """An artifact of one file, as a store would put it."""
    objects.write(upload_prefix(ADDRESS, *name, upload) + "data.bin", b"12345")
    version = read_version(objects, ADDRESS, *name)
    envelope = Envelope.of("live", upload, {})
    if version is None:
        assert objects.create(envelope_key(ADDRESS, *name), envelope.to_bytes()) is not None
    else:
        assert objects.replace(envelope_key(ADDRESS, *name), envelope.to_bytes(), version.etag) is not None


def look(objects: Objects, name: Name) -> bytes | None:
    """The file of an artifact; None where there is none, and empty where it is half there."""
    version = read_version(objects, ADDRESS, *name)
    if version is None or not version.exists:
        return None
    found = objects.read(upload_prefix(ADDRESS, *name, version.envelope.upload) + "data.bin")
    return b"" if found is None else found.content
