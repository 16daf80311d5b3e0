"""The id by which a tracking server tells a run from others of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.runs.checksummed_json import RecordCorrupted
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.tracked_as import note_tracking_id, tracking_id
from tests.infra.runs.leases import somebody


def holder(root: Path, run: str = "demo") -> LocalRecords:
    """The records of a run that another process has taken over."""
    lease = acquire_lease(root, run, identity=somebody(), alive=lambda _: False)
    return LocalRecords(root, run, lease=lease)


def test_a_run_keeps_its_id_also_where_nothing_is_committed_yet(tmp_path: Path) -> None:
    assert tracking_id(LocalRecords(tmp_path, "demo")) is None
    made = note_tracking_id(holder(tmp_path))
    assert made is not None
    assert note_tracking_id(holder(tmp_path)) == made == tracking_id(LocalRecords(tmp_path, "demo"))


def test_runs_of_one_name_in_two_stores_have_ids_of_their_own(tmp_path: Path) -> None:
    assert note_tracking_id(holder(tmp_path / "a")) != note_tracking_id(holder(tmp_path / "b"))


def test_a_damaged_note_is_told_with_what_helps_and_never_taken_for_none(tmp_path: Path) -> None:
    """By its name alone a run could be taken for one of another store."""
    note_tracking_id(holder(tmp_path))
    [note] = tmp_path.rglob("tracking/*.json")
    note.chmod(0o644)
    note.write_bytes(b"{}")
    with pytest.raises(RecordCorrupted, match=r"move it away: the run gets a new MLflow run then"):
        note_tracking_id(holder(tmp_path))
