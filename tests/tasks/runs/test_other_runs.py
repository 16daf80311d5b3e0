"""What lies among the runs of a store and cannot be read: nobody's run ends of it, and whatever it may need stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.runs.fsck import check_run, check_store
from tasks.runs.retention import find_garbage, remove_garbage
from tests.tasks.toy_runs import ToyRun, replace

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("dataset.evaluation=null", "iterations=3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A store with the runs toy and other, which is another one of the same iterations."""
    run = ToyRun(tmp_path_factory.mktemp("trained") / "home", SHORT)
    run.train()
    ToyRun(run.home, (*SHORT, "seed=9"), name="other").train()
    return run


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Run toy in a copy of that store, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def folder_for_record(other: Path) -> None:
    """Where its first record was."""
    (other / "iterations/000000.json").unlink()
    (other / "iterations/000000.json").mkdir()


def loop_for_record(other: Path) -> None:
    """A link to itself."""
    (other / "iterations/000002.json").unlink()
    (other / "iterations/000002.json").symlink_to("000002.json")


def deep_record(other: Path) -> None:
    """More brackets than any parser follows."""
    replace(other / "iterations/000001.json", b"[" * 200_000)


def loop_for_run(other: Path) -> None:
    """As with a folder of another user, whatever is below it gives an error."""
    shutil.rmtree(other)
    other.symlink_to(other.name)


def loop_for_leases(other: Path) -> None:
    """Its records can be read, and not what it works with."""
    shutil.rmtree(other / "leases")
    (other / "leases").symlink_to("leases")


UNREADABLE: dict[Callable[[Path], None], str] = {
    folder_for_record: "run other",
    loop_for_record: "run other",
    deep_record: "run other",
    loop_for_run: "a process that has a run",
    loop_for_leases: "a process that has a run",
}


@pytest.mark.parametrize("harm", UNREADABLE)
def test_what_cannot_be_read_of_another_run_ends_nobodys_run_and_keeps_all_that_it_may_need(
    run: ToyRun, harm: Callable[[Path], None]
) -> None:
    harm(run.home / "store/runs/other")
    artifacts = set((run.home / "store").glob("*/*/manifest.json"))
    assert len(run.train("iterations=5", "checkpoint.keep_last=1")) == 6
    told = f"what {UNREADABLE[harm]} needs cannot be read, so no checkpoint is removed: "
    assert run.said.count(told) == 1
    assert "other" in run.said.partition(told)[2].splitlines()[0]
    garbage = find_garbage()
    assert (garbage.artifacts, next(iter(garbage.unreadable))) == ([], UNREADABLE[harm])
    remove_garbage(garbage)
    assert artifacts <= set((run.home / "store").glob("*/*/manifest.json"))
    assert run.train("iterations=6")[-1].iteration == 6


@pytest.mark.parametrize("harm", [harm for harm in UNREADABLE if harm is not loop_for_leases])
def test_fsck_says_what_cannot_be_read(run: ToyRun, harm: Callable[[Path], None]) -> None:
    harm(run.home / "store/runs/other")
    found = {found.run: found.damages for found in check_store(lambda text: None)}
    assert (found["toy"], found[None]) == ([], [])
    assert found["other"][0].what.startswith("record")
    assert check_run("other", lambda text: None).damages == found["other"]


def moved_away(runs: Path) -> None:
    """All of them."""
    runs.rename(runs.parent.parent / "elsewhere")


def dangling_runs(runs: Path) -> None:
    """They lay on a disk that is not mounted."""
    moved_away(runs)
    runs.symlink_to("/not/mounted")


def renamed(runs: Path) -> None:
    """As a file manager renames a copy."""
    (runs / "other").rename(runs / "other (old)")


def dangling_run(runs: Path) -> None:
    """It lay on a disk that is not mounted."""
    shutil.rmtree(runs / "other")
    (runs / "other").symlink_to("/not/mounted/other")


def without_records(runs: Path) -> None:
    """The spec alone is left."""
    shutil.rmtree(runs / "other/iterations")


def dangling_record(runs: Path) -> None:
    """The last one, which no other names."""
    (runs / "other/iterations/000003.json").unlink()
    (runs / "other/iterations/000003.json").symlink_to("/not/mounted/000003.json")


LOST: dict[Callable[[Path], None], tuple[str, str]] = {
    moved_away: ("any run", "make an empty folder there"),
    dangling_runs: ("any run", "make it readable, or move it out of the store"),
    renamed: ("run other (old)", "rename it to one, or move it out"),
    dangling_run: ("run other", "cannot be read"),
    without_records: ("run other", "`ppoflow resume other` make them again"),
    dangling_record: ("run other", "is a link to what is not there"),
}


@pytest.mark.parametrize("harm", LOST)
def test_what_a_lost_run_may_need_is_no_garbage(run: ToyRun, harm: Callable[[Path], None]) -> None:
    harm(run.home / "store/runs")
    garbage, (whose, remedy) = find_garbage(), LOST[harm]
    assert (garbage.artifacts, list(garbage.unreadable)[-1]) == ([], whose)
    assert remedy in garbage.unreadable[whose]


def test_of_runs_that_were_removed_everything_is_garbage(run: ToyRun) -> None:
    stored = len(list((run.home / "store").glob("*/*/manifest.json")))
    for name in ("toy", "other"):
        shutil.rmtree(run.home / "store/runs" / name)
    garbage = find_garbage()
    assert (len(garbage.artifacts), garbage.unreadable) == (stored, {})


def test_a_store_without_anything_has_nothing_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    assert (find_garbage().rows(), find_garbage().unreadable) == ([], {})


@pytest.mark.parametrize("folder", ["caf\udcff", "renamed toy"])
def test_a_folder_of_promotions_that_no_model_has_is_told_and_keeps_everything(run: ToyRun, folder: str) -> None:
    (run.home / "store/promotions" / folder).mkdir(parents=True)
    garbage = find_garbage()
    assert (garbage.artifacts, [*garbage.unreadable]) == ([], ["the journal of promotions"])
    [told] = [damage for found in check_store(lambda text: None) for damage in found.damages]
    assert (told.what, "move it out of the store" in told.complaint) == ("promotions", True)
