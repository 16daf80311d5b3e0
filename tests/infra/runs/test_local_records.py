"""Records in a folder: what people find there, and what a disk does that S3 does not."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords
from infra.runs.local_runs import LocalRuns
from infra.runs.records import RecordCorrupted
from infra.storage.filesystem import LocalFiles, StoreReadOnly, StoreUnsupported
from tests.infra.runs.leases import successor, writer


def test_a_record_is_a_readable_file_with_a_checksum(tmp_path: Path):
    writer(tmp_path).commit(1, {"metrics": {"kl": 0.5}})
    document = json.loads((tmp_path / "runs/r/iterations/000001.json").read_text())
    assert {name: value for name, value in document.items() if name != "seal"} == {"metrics": {"kl": 0.5}}
    assert document["seal"]["format"] == 1
    assert LocalRecords(f"file://{tmp_path}", "r").last() == 1
    with pytest.raises(StoreUnsupported):
        LocalRecords("s3://bucket", "r")


def test_a_document_under_another_ones_name_is_damage(tmp_path: Path):
    records, run = writer(tmp_path), tmp_path / "runs/r"
    records.commit(1, {})
    records.note("rollbacks", {})
    (run / "iterations/000001.json").rename(run / "iterations/000002.json")
    (run / "rollbacks/000001.json").rename(run / "rollbacks/000009.json")
    with pytest.raises(RecordCorrupted, match=r"000002\.json does not have its own sha256"):
        records.read(2)
    with pytest.raises(RecordCorrupted, match=r"000009\.json does not have its own sha256"):
        records.notes("rollbacks")


class ReadOnlyFiles(LocalFiles):
    """A disk mounted read-only."""

    def make_folder(self, folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))


def test_a_read_only_store_says_so(tmp_path: Path):
    with pytest.raises(StoreReadOnly, match=rf"{tmp_path}/store cannot be written to"):
        acquire_lease(tmp_path / "store", "r", files=ReadOnlyFiles())
    lease = acquire_lease(tmp_path / "store", "r")
    with pytest.raises(StoreReadOnly, match=rf"{tmp_path}/store cannot be written to"):
        LocalRecords(tmp_path / "store", "r", files=ReadOnlyFiles(), lease=lease).commit(1, {})


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_named_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    lease = acquire_lease(tmp_path, "r")

    def link(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreUnsupported, match=rf"{tmp_path}/runs/r.*has no hard links.*put the store on one that has"):
        LocalRecords(tmp_path, "r", lease=lease).create_spec({})
    assert not (tmp_path / "runs/r/spec.json").exists()


def test_a_lease_of_another_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is not one of the run"):
        LocalRecords(tmp_path, "r", lease=successor(tmp_path / "elsewhere"))


def test_what_is_taken_out_lies_in_the_folder_of_the_lease(tmp_path: Path):
    records = writer(tmp_path)
    records.create_spec({"seed": 1})
    for number in (1, 2):
        records.commit(4, {"try": number})
        assert os.listdir(tmp_path / "runs/r/leases/000001/partial") == []
        records.supersede(3)
    spec = tmp_path / "runs/r/spec.json"
    good = spec.read_bytes()
    records.restore_spec({"seed": 1})
    assert spec.read_bytes() == good
    kept = tmp_path / "runs/r/leases/000001/superseded"
    assert sorted(os.listdir(kept)) == ["000004-2.json", "000004.json", "spec.json"]
    assert [json.loads((kept / name).read_text())["try"] for name in ("000004.json", "000004-2.json")] == [1, 2]
    successor(tmp_path)
    ended = tmp_path / "runs/r/leases/000001.ended"
    assert sorted(os.listdir(ended)) == ["heartbeat", "holder.json", "pins", "superseded"]
    assert sorted(os.listdir(ended / "superseded")) == ["000004-2.json", "000004.json", "spec.json"]


def test_a_run_that_is_being_created_is_none(tmp_path: Path):
    (tmp_path / "runs/.new-1").mkdir(parents=True)
    assert LocalRuns(tmp_path).names(started=False) == []
