"""What no record of a run needs and must be there all the same: what diverged, and what promotions rest on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef
from infra.mlflow.alias_journal import Journals, Move
from tasks.runs.fsck import check_run, check_store
from tasks.runs.iteration_record import IterationRecord, read_record
from tasks.runs.retention import find_garbage
from tests.flows.test_rollback import guarded
from tests.tasks.toy_runs import ToyRun, flip_a_bit, lose_a_file, lose_it

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run that was rolled back."""
    run = guarded(tmp_path_factory.mktemp("trained") / "home")
    run.train()
    return run


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def in_the_store() -> list[str]:
    """What fsck finds damaged."""
    return [damage.what for found in check_store(lambda text: None) for damage in found.damages]


def promoted(run: ToyRun, record: IterationRecord) -> ArtifactRef:
    """Make its policy the champion."""
    ref = record.checkpoint.bare()
    move = Move(
        number=1,
        model="arithmetic",
        alias="champion",
        action="promote",
        version="1",
        before=None,
        by="me",
        at_ms=1,
        artifacts=(ref,),
    )
    assert Journals(str(run.home / "store")).of("arithmetic").append(move)
    return ref


@pytest.mark.parametrize("damage", [flip_a_bit, lose_a_file, lose_it])
def test_damaged_evidence_is_found(run: ToyRun, damage: Callable[[Path], None]) -> None:
    record = read_record(run.notes("divergences")[0]["record"])
    damage(run.place(record.checkpoint))
    [told] = check_run("toy", lambda text: None).damages
    assert (told.what, told.repair) == (f"checkpoint of iteration {record.iteration}, which diverged", None)
    assert "put it back from a copy; it is kept as evidence" in told.remedy
    assert in_the_store() == [told.what]


def test_a_lost_champion_is_missed_when_its_run_is_gone_too(run: ToyRun) -> None:
    champion = promoted(run, run.records()[3])
    shutil.rmtree(run.folder)
    assert in_the_store() == []
    lose_it(run.place(champion))
    assert in_the_store() == [f"checkpoint/{champion.key}"]


def test_it_is_told_once_where_its_run_misses_it_too(run: ToyRun) -> None:
    lose_it(run.place(promoted(run, run.records()[3])))
    assert in_the_store() == ["checkpoint of iteration 3"]


def model_elsewhere(promotions: Path, elsewhere: Path) -> None:
    """The journal of the model lies on another disk."""
    (promotions / "arithmetic").rename(elsewhere)
    (promotions / "arithmetic").symlink_to(elsewhere)


def all_elsewhere(promotions: Path, elsewhere: Path) -> None:
    """All journals do."""
    promotions.rename(elsewhere)
    promotions.symlink_to(elsewhere)


def page_elsewhere(promotions: Path, elsewhere: Path) -> None:
    """A page of it does."""
    page = promotions / "arithmetic/000001.json"
    page.rename(elsewhere)
    page.symlink_to(elsewhere)


@pytest.mark.parametrize("move", [model_elsewhere, all_elsewhere, page_elsewhere])
def test_promotions_by_way_of_a_link_keep_what_they_rest_on(run: ToyRun, move: Callable[[Path, Path], None]) -> None:
    champion, elsewhere = promoted(run, run.records()[3]), run.home / "elsewhere"
    shutil.rmtree(run.folder)
    move(run.home / "store/promotions", elsewhere)
    garbage = find_garbage()
    assert garbage.unreadable == {}
    assert champion.key not in [found.key for found in garbage.artifacts]
    assert len(garbage.artifacts) > 10
    assert in_the_store() == []
    elsewhere.rename(run.home / "not mounted")
    garbage = find_garbage()
    assert (garbage.artifacts, [*garbage.unreadable]) == ([], ["the journal of promotions"])
    assert len(in_the_store()) == 1
