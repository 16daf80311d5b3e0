"""What helps where a document of a run is lost or damaged: the spec is written again, and each kind says its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.runs.lease import LeaseLost
from infra.runs.local_records import LocalRecords
from infra.runs.local_runs import LocalRuns
from infra.runs.records import RecordCorrupted
from tests.infra.runs.leases import successor, writer

RECORD = {"checkpoint": {"kind": "checkpoint", "digest": "ab"}}


def test_a_lost_or_damaged_spec_is_written_again_and_what_was_there_is_kept(tmp_path: Path):
    records = writer(tmp_path)
    records.create_spec({"seed": 1})
    spec = tmp_path / "runs/r/spec.json"
    good = spec.read_bytes()
    spec.unlink()
    records.restore_spec({"seed": 1})
    assert spec.read_bytes() == good
    spec.unlink()
    spec.write_bytes(good[:-3])
    with pytest.raises(RecordCorrupted, match=r"`ppoflow fsck r --repair` writes it again"):
        records.read_spec()
    records.restore_spec({"seed": 1})
    assert records.read_spec() == {"seed": 1}
    assert (tmp_path / "runs/r/leases/000001/superseded/spec.json").read_bytes() == good[:-3]


def test_only_the_holder_of_the_lease_restores_a_spec(tmp_path: Path):
    records = writer(tmp_path)
    successor(tmp_path)
    with pytest.raises(LeaseLost):
        records.restore_spec({"seed": 1})
    with pytest.raises(ValueError, match="open for reading only"):
        LocalRecords(tmp_path, "r").restore_spec({"seed": 1})
    assert not (tmp_path / "runs/r/spec.json").exists()


def test_a_run_that_has_records_and_no_spec_was_started(tmp_path: Path):
    records = writer(tmp_path)
    assert LocalRuns(tmp_path).names() == []
    records.commit(0, RECORD)
    assert LocalRuns(tmp_path).names() == ["r"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("iterations/000001.json", "`ppoflow fsck r --repair` takes iteration 1 and those after it out of the run"),
        ("rollbacks/000001.json", "the learning rates of the iterations after it depend on it"),
        ("divergences/000001.json", "nothing depends on it"),
    ],
)
def test_each_kind_of_document_has_its_own_remedy(tmp_path: Path, name: str, remedy: str):
    records = writer(tmp_path)
    records.commit(1, RECORD)
    records.note("rollbacks", {})
    records.note("divergences", {})
    place = tmp_path / "runs/r" / name
    place.chmod(0o644)
    place.write_bytes(b"{}")
    kind = name.partition("/")[0]
    with pytest.raises(RecordCorrupted) as refusal:
        records.read(1) if kind == "iterations" else records.notes(kind)
    assert remedy in str(refusal.value)
