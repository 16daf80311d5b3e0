"""Records on S3: what is asked of it, and what a head can name and a folder cannot."""

from __future__ import annotations

import pytest

from infra.runs.records import RecordCorrupted
from infra.runs.s3_runs import S3Runs
from tests.infra.places import ADDRESS, Bucket

RECORD = {"metrics": {"kl": 0.5}}


def test_a_record_that_is_named_and_gone_is_damage() -> None:
    place = Bucket()
    place.writer().commit(1, RECORD)
    place.document("iterations/1").write(None)
    with pytest.raises(RecordCorrupted, match="is gone, and run r names it"):
        place.records().read(1)


def test_several_threads_write_and_list_runs() -> None:
    place = Bucket()
    runs = S3Runs(ADDRESS, place.objects, threads=4)
    runs.create("r", {"seed": 1}, {number: {"iteration": number} for number in range(9)})
    place.writer(run="never-started")
    assert place.state()[1:3] == (list(range(9)), [{"iteration": number} for number in range(9)])
    assert (runs.names(), runs.names(started=False)) == (["r"], ["never-started", "r"])


def test_what_was_read_once_is_not_read_again() -> None:
    place = Bucket()
    objects = place.seam()
    records = place.writer(objects)
    records.create_spec({"seed": 1})
    records.commit(0, RECORD)
    start = len(objects.trace)
    for _ in range(5):
        assert (records.read(0), records.last(), records.read_spec()) == (RECORD, 0, {"seed": 1})
        assert records.notes("rollbacks") == []
    assert len(objects.trace) == start
    records.commit(1, RECORD)
    assert [call.split()[0] for call in objects.trace[start:]] == ["write", "replace"]
