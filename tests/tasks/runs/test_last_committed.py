"""That the last records of a run are there, which no later record names: what names the last one tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.runs.local_records import LAST
from infra.runs.records import RecordCorrupted, RecordMissing
from tasks.runs.fork import fork_run
from tasks.runs.fsck import check_run
from tasks.runs.inspect import read_run
from tasks.runs.repair import repair_records
from tasks.runs.retention import find_garbage
from tests.tasks.toy_runs import ToyRun, digests, finished, replace

pytestmark = pytest.mark.usefixtures("prefect_server")
SHORT = ("iterations=4", "dataset.evaluation=null", "registry.metric=policy/quality")
LOST = "the records of iterations 3 to 4 of run toy had been written, and cannot be found: "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run."""
    return finished(tmp_path_factory.mktemp("trained") / "home", SHORT)


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def found() -> list[tuple[str, str | None, int]]:
    """What fsck finds."""
    return [(one.what, one.repair, one.iteration) for one in check_run("toy", lambda text: None).damages]


def lose(run: ToyRun, *iterations: int) -> None:
    """Remove records."""
    for iteration in iterations:
        (run.folder / f"iterations/{iteration:06d}.json").unlink()


def test_a_run_that_lost_its_last_records_says_so_and_makes_them_again(run: ToyRun) -> None:
    before = digests(run.records())
    assert "!" not in read_run("toy").summary()
    lose(run, 3, 4)
    assert f"! {LOST}put back what is missing from a copy, or let `ppoflow resume toy`" in read_run("toy").summary()
    assert found() == [("record of iteration 3", "records", 3)]
    garbage = find_garbage()
    assert (garbage.artifacts, [*garbage.unreadable]) == ([], ["run toy"]), "what the lost records need is kept"
    assert digests(run.train()) == before
    assert f"{LOST}it is made again, from the stages that are still in the store" in run.said
    assert set(run.engines.done) <= {"describe_sources"}, "every stage came from the store"
    assert found() == []
    assert "!" not in read_run("toy").summary()
    run.train()
    assert run.said.count(LOST) == 1


def test_all_records_may_be_lost(run: ToyRun) -> None:
    before = digests(run.records())
    lose(run, 0, 1, 2, 3, 4)
    assert found() == [("record of iteration 0", "records", 0)]
    with pytest.raises(RecordMissing, match="the records of iterations 0 to 4 of run toy had"):
        read_run("toy")
    assert digests(run.train()) == before


def test_repair_gives_up_lost_records(run: ToyRun) -> None:
    before = digests(run.records())
    lose(run, 3, 4)
    said = "iteration 2 is the last one of run toy now: `ppoflow resume toy` goes on from it"
    assert repair_records("toy") == [said]
    assert found() == []
    assert digests(run.train()) == before


def test_another_record_in_the_place_of_the_last_one_is_refused(run: ToyRun) -> None:
    before, last = digests(run.records()), (run.folder / LAST).read_bytes()
    run.forge(4, committed_at_ms=1)
    (run.folder / LAST).write_bytes(last)
    with pytest.raises(RecordCorrupted, match=r"iteration 4 of run toy .* is not the one that was committed"):
        run.train("iterations=5")
    assert [*find_garbage().unreadable] == ["run toy"]
    assert found() == [("record of iteration 4", "records", 4)]
    (said,) = repair_records("toy")
    assert said.startswith("iterations 4 are taken out of run toy and kept aside")
    assert digests(run.train()) == before


def test_what_names_the_last_record_may_be_damaged_gone_or_one_behind(run: ToyRun) -> None:
    place = run.folder / LAST
    good = place.read_bytes()
    assert json.loads(good)["iteration"] == 4
    replace(place, good[:-5])
    with pytest.raises(RecordCorrupted, match=r"last\.json .*: `ppoflow fsck toy --repair` writes it again"):
        run.train()
    assert found() == [("last.json", "records", 5)]
    assert repair_records("toy") == ["iteration 4 is the last one of run toy now: `ppoflow resume toy` goes on from it"]
    assert place.read_bytes() == good
    place.unlink()
    assert found() == [("last.json", "records", 5)]
    run.train("iterations=5")
    assert found() == []
    behind = place.read_bytes()
    run.train("iterations=6")
    replace(place, behind)  # as if its writer had died right after the record
    assert found() == []
    run.train("iterations=7")
    assert json.loads(place.read_bytes())["iteration"] == 7


def test_a_fork_has_one_of_its_own(run: ToyRun) -> None:
    fork_run("toy", 2, "new", ["iterations=4"])
    assert json.loads((run.folder.with_name("new") / LAST).read_bytes())["iteration"] == 2
    (run.folder.with_name("new") / "iterations/000002.json").unlink()
    assert "the record of iteration 2 of run new had been written" in read_run("new").summary()
