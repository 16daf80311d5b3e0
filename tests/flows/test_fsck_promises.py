"""`ppoflow fsck` of what nothing else tells: unreadable files, a lost `last.json`, what retention promises."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

import flows.fsck
from flows.fsck import repair
from infra.artifacts import ArtifactRef
from infra.artifacts.local_store import LocalStore
from infra.backend import open_records
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LAST, LocalRecords
from infra.runs.tracked_as import note_tracking_id
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.register_policy import export_best
from tasks.runs.findings import Damage
from tasks.runs.fsck import check_run, check_store
from tasks.runs.repair import repair_records
from tests.tasks.toy_engines import better_each_time
from tests.tasks.toy_runs import ToyRun, finished

pytestmark = pytest.mark.usefixtures("prefect_server")
THINNED = ("iterations=4", "evaluation.every=2", "checkpoint.keep_last=1", "checkpoint.keep_every=2")


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run that keeps the checkpoints of iterations 2 and 4."""
    return finished(tmp_path_factory.mktemp("thinned") / "home", THINNED)


@pytest.fixture
def run(thinned: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return thinned.own_copy(tmp_path / "home", monkeypatch)


def damages() -> list[Damage]:
    """All that fsck finds in the store."""
    return [damage for found in check_store(lambda text: None) for damage in found.damages]


def test_what_the_system_cannot_read_is_a_damage_and_the_rest_is_read(
    run: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk with a bad sector."""
    check, read = LocalStore.check, list[str]()

    def failing(store: LocalStore, ref: ArtifactRef) -> int:
        read.append(ref.kind)
        if ref.kind == "rollouts":
            raise OSError(errno.EIO, "Input/output error", f"{ref.key}/rollouts.parquet")
        return check(store, ref)

    monkeypatch.setattr(LocalStore, "check", failing)
    found = damages()
    assert {damage.what.rpartition(" ")[0] for damage in found} == {"rollouts of iteration"}
    assert len(found) >= 4
    assert all("Input/output error" in damage.complaint and damage.repair is None for damage in found)
    assert {"scores", "experience", "checkpoint", "evaluation"} <= set(read)


def test_a_copy_that_cannot_be_read_is_a_damage(run: ToyRun) -> None:
    context = run.context()
    folder = export_best(context, run.records()[-1].best)
    assert context.lease is not None
    context.lease.release()
    manifest = folder / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    [told] = damages()
    assert (told.what, told.repair) == ("copy of the best policy", None)
    assert "Is a directory" in told.complaint


def test_a_lost_name_of_the_last_record_is_a_damage_and_written_again(run: ToyRun) -> None:
    (run.folder / LAST).unlink()
    [told] = damages()
    assert told.complaint == "run toy has lost last.json, which names its last record"
    records = run.record_bytes()
    repair_records("toy")
    assert (run.folder / LAST).exists()
    assert (damages(), run.record_bytes()) == ([], records)


def test_records_that_are_lost_with_it_are_not_taken_for_a_shorter_run(run: ToyRun) -> None:
    for name in (LAST, "iterations/000003.json", "iterations/000004.json"):
        (run.folder / name).unlink()
    assert any("has lost last.json" in damage.complaint for damage in damages())


def test_a_run_of_one_record_may_have_died_before_naming_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path / "short", ("iterations=1",)).own_copy(tmp_path / "home", monkeypatch)
    (run.folder / "iterations/000001.json").unlink()
    (run.folder / LAST).unlink()
    assert check_run("toy", lambda text: None).damages == []


@pytest.mark.parametrize(("iteration", "found"), [(1, []), (2, ["checkpoint of iteration 2"]), (3, [])])
def test_a_checkpoint_that_is_promised_is_missed(run: ToyRun, iteration: int, found: list[str]) -> None:
    """keep_every=2 keeps that of iteration 2; the others were let go."""
    shutil.rmtree(run.place(run.records()[iteration].checkpoint), ignore_errors=True)
    assert [damage.what for damage in damages()] == found


def test_a_retention_that_was_stricter_once_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ToyRun(tmp_path / "strict", ("iterations=3", "evaluation.every=1", "checkpoint.keep_last=1"))
    run.engines.jobs["score_evaluation"] = better_each_time()
    run.train()
    run.overrides = (*run.overrides, "checkpoint.keep_every=2")
    run.train("iterations=5")
    run = run.own_copy(tmp_path / "home", monkeypatch)
    assert not run.place(run.records()[2].checkpoint).exists()
    assert damages() == []


def test_a_damaged_note_of_the_tracked_run_is_a_damage(run: ToyRun) -> None:
    root = str(run.home / "store")
    lease = acquire_lease(root, "toy")
    note_tracking_id(LocalRecords(root, "toy", lease=lease))
    lease.release()
    assert damages() == []
    [note] = (run.folder / "tracking").iterdir()
    note.chmod(0o644)
    note.write_bytes(b"{}")
    [told] = damages()
    assert told.what == "notes of tracking"
    assert "move it away: the run gets a new MLflow run then" in told.complaint


def test_a_run_that_cannot_be_repaired_does_not_keep_others_from_it(
    run: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*_: Any) -> list[str]:
        raise InputError("there is no folder data")

    monkeypatch.setattr(flows.fsck, "repair_artifacts", moved)
    shutil.rmtree(run.place(run.records()[2].artifacts["score_rollouts"]))
    (run.folder / "spec.json").unlink()
    [found] = [found for found in check_store(lambda text: None) if found.damages]
    *done, last = repair(found)
    assert last == "run toy: not repaired: there is no folder data"
    assert done  # what was repaired before is told
    assert open_records(Settings().store_root, "toy").read_spec() is not None


def test_after_a_rollback_nothing_is_missed_that_retention_had_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that let it go are no part of the run any more."""
    kept = ("iterations=5", "evaluation.every=9", "registry.metric=kl/reference", "checkpoint.keep_last=2")
    run = finished(tmp_path / "frugal", kept).own_copy(tmp_path / "home", monkeypatch)
    context = run.context()
    context.supersede(4)
    assert context.lease is not None
    context.lease.release()
    assert not run.place(run.records()[3].checkpoint).exists()
    assert damages() == []
