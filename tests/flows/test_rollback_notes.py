"""Notes of rollbacks that are lost, changed or of another run: the records of the run say what is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.fsck import repair_run
from infra.runs.checksummed_json import encode
from infra.runs.records import RecordCorrupted
from tasks.runs.findings import Damage
from tasks.runs.fsck import check_run
from tasks.runs.inspect import read_run
from tests.flows.test_fork_rollback import ATTEMPTS, SETTINGS, attempts, copied
from tests.flows.test_rollback import diverges_in_the_fourth, guarded
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, digests, finished

pytestmark = pytest.mark.usefixtures("prefect_server")
NOTE = "rollbacks/000001.json"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run that was rolled back from iteration 4 to 1."""
    run = finished(tmp_path_factory.mktemp("trained") / "home", SETTINGS, diverges_in_the_fourth)
    assert attempts(run.records()) == ATTEMPTS
    return run


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return copied(trained, tmp_path / "home", monkeypatch)


def damages() -> list[Damage]:
    """What fsck finds."""
    return check_run("toy", lambda text: None).damages


def test_a_lost_note_is_told_and_the_next_start_writes_it_again(run: ToyRun) -> None:
    [before] = run.notes("rollbacks")
    (run.folder / NOTE).unlink()
    lost = "! the note of its rollback to iteration 1 is lost: the next start of the run writes it again"
    assert lost in CliRunner().invoke(app, ["status", "toy"]).output
    assert attempts(run.train("iterations=7")) == [*ATTEMPTS, (1, 0.5), (1, 0.5)]
    assert "the note of the rollback of run toy to iteration 1 was lost; it is written again" in run.said
    [again] = run.notes("rollbacks")
    assert (again["after"], again["attempt"]) == (before["after"], before["attempt"])
    assert damages() == []


def test_a_repair_writes_it_again_and_takes_no_record_out(run: ToyRun) -> None:
    records = run.record_bytes()
    (run.folder / NOTE).unlink()
    [told] = damages()
    assert (told.what, told.repair) == ("notes of rollbacks", "notes")
    assert told.complaint == "run toy went back to iteration 1, as its records tell, and no note says so"
    lines = list(repair_run("toy", check_run("toy", lambda text: None)))
    assert lines == ["the rollback of run toy to iteration 1 is noted again"]
    assert (damages(), run.record_bytes()) == ([], records)


@pytest.mark.parametrize("lost", [[1], [2], [1, 2]])
def test_of_two_rollbacks_whichever_is_lost(lost: list[int], run: ToyRun) -> None:
    """Written again it comes behind the others, and changes nothing."""

    def diverges_again(iteration: int, rate_factor: float) -> dict[str, float]:
        return {"kl/reference": 9.0 if (iteration, rate_factor) in ((4, 1.0), (6, 0.5)) else 1.0}

    run.engines = ToyEngines(diverges_again)
    both = [*ATTEMPTS[:4], (2, 0.25), (2, 0.25), (2, 0.25)]
    assert attempts(run.train("iterations=6")) == both
    for number in lost:
        (run.folder / f"rollbacks/{number:06d}.json").unlink()
    assert [told.repair for told in damages()] == ["notes"] * len(lost)
    before = digests(run.records())
    assert attempts(run.train("iterations=7")) == [*both, (2, 0.25)]
    assert digests(run.records())[:7] == before
    assert (len(run.notes("rollbacks")), damages()) == (2, [])


def test_a_lost_note_that_only_the_last_record_tells_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What diverged is noted too, so that record is not blamed."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    run = guarded(tmp_path, "guards.rollback_iterations=0")
    assert attempts(run.train("iterations=4"))[3:] == [(0, 1.0), (1, 0.5)]
    (run.folder / NOTE).unlink()
    assert [told.repair for told in damages()] == ["notes"]
    assert attempts(run.train())[3:] == [(0, 1.0), (1, 0.5), (1, 0.5)]


def test_an_attempt_below_the_one_before_is_refused(run: ToyRun) -> None:
    """As a version wrote it that did not miss the note."""
    run.forge(5, attempt=0, rate_factor=1.0)
    with pytest.raises(RecordCorrupted, match="iteration 5 of run toy is of attempt 0, and the one before it of attem"):
        read_run("toy")
    assert [(told.repair, told.iteration) for told in damages()] == [("records", 5)]


def test_an_attempt_to_which_no_rollback_led_is_refused(run: ToyRun) -> None:
    run.forge(5, attempt=3, rate_factor=0.125)
    with pytest.raises(RecordCorrupted, match=r"iteration 5 of run toy is of attempt 3 .* and no rollback led to it"):
        read_run("toy")
    assert {(told.repair, told.iteration) for told in damages()} == {("records", 5)}


def test_a_note_that_says_otherwise_than_the_records_is_blamed(run: ToyRun) -> None:
    run.rewrite(NOTE, lambda note: note | {"attempt": {"number": 1, "rate_factor": 0.25}})
    told = "note rollbacks/000001.json of run toy says otherwise than the record of iteration 2, of attempt 1: "
    [found] = damages()
    assert (found.what, found.repair) == ("notes of rollbacks", None)
    assert told in found.complaint
    with pytest.raises(RecordCorrupted, match=told):
        run.train("iterations=6")
    (run.folder / NOTE).unlink()  # moved away, as advised
    assert attempts(run.train("iterations=6"))[5:] == [(1, 0.5), (1, 0.5)]


def sealed(run: ToyRun, name: str, note: dict[str, Any]) -> None:
    """Put a note there with a checksum that holds."""
    (run.folder / name).parent.mkdir(exist_ok=True)
    (run.folder / name).write_bytes(encode(name, note))


FIRST = {"after": 1, "attempt": {"number": 2, "rate_factor": 0.5}, "passed": ["kl/reference=9 passes guards.max_kl=5"]}
FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "another run's": (FIRST | {"run": "other", "follows": "0" * 64}, "is one of run other"),
    "of a run of this name": (
        FIRST | {"run": "toy", "follows": "0" * 64},
        "goes back to another record of iteration 1",
    ),
    "an earlier version's": (FIRST | {"after": 4}, "goes back to another record of iteration 4"),
    "none at all": ({"to": 1}, r"is none that this version can read \(after: Field required\)"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_note_that_is_not_of_this_run_takes_nothing_out(foreign: str, run: ToyRun) -> None:
    records, (note, complaint) = run.record_bytes(), FOREIGN[foreign]
    sealed(run, "rollbacks/000002.json", note)
    told = rf"note rollbacks/000002.json of run toy {complaint}.*: put it back from a copy.* Or move it away: "
    with pytest.raises(RecordCorrupted, match=told):
        run.train("iterations=6")
    [found] = damages()
    assert (found.what, found.repair) == ("notes of rollbacks", None)
    assert re.search(told, found.complaint)
    assert run.record_bytes() == records
    (run.folder / "rollbacks/000002.json").unlink()
    assert damages() == []


def test_a_divergence_that_is_none_is_told(run: ToyRun) -> None:
    sealed(run, "divergences/000002.json", {"iteration": "x"})
    [found] = damages()
    assert "note divergences/000002.json of run toy is none that this version can read (iteration: " in found.complaint


def test_notes_of_an_earlier_version_are_read(run: ToyRun) -> None:
    """They name neither their run nor the record that they follow; also where the rollback was not finished."""
    run.rewrite(NOTE, lambda note: {name: note[name] for name in ("after", "attempt", "passed")})
    run.rewrite("divergences/000001.json", lambda note: {name: note[name] for name in note if name != "run"})
    assert damages() == []
    sealed(run, "rollbacks/000002.json", FIRST)  # iteration 4 has diverged
    assert damages() == []
    assert attempts(run.train("iterations=6")) == [*ATTEMPTS[:2], *[(2, 0.5)] * 5]
    assert damages() == []
