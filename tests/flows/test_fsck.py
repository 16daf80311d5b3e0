"""`ppoflow fsck`: it finds whatever is damaged, says what helps, and repairs what can be repaired."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.fsck import remake
from infra.artifacts import ArtifactRef, open_store
from infra.backend import open_runs
from infra.runs.lease import LeaseHeld
from infra.runs.local_lease import acquire_lease
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.register_policy import export_best
from tasks.runs.findings import Findings
from tasks.runs.fsck import check_run, check_store
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.repair import repair_records
from tests.tasks.toy_runs import DAMAGES, ToyRun, digests, finished, flip_a_bit, replace, snapshot, with_artifact

pytestmark = pytest.mark.usefixtures("prefect_server")
SETTINGS = ("iterations=4", "evaluation.every=2")
MADE: dict[str, Callable[[ToyRun], ArtifactRef | None]] = {
    "dataset": lambda run: run.records()[2].dataset,
    "reference": lambda run: run.records()[2].reference,
    "rollouts": lambda run: run.records()[2].made("rollouts"),
    "scores": lambda run: run.records()[3].made("scores"),
    "experience": lambda run: run.records()[2].made("experience"),
    "checkpoint": lambda run: run.records()[1].checkpoint,
    "last checkpoint": lambda run: run.records()[4].checkpoint,
    "evaluation": lambda run: run.records()[2].evaluation,
    "first answers": lambda run: next(ref for ref in made_from(run.records()[0].evaluation) if ref.kind == "rollouts"),
}


def made_from(ref: ArtifactRef | None) -> list[ArtifactRef]:
    """What an artifact was made from."""
    return [] if ref is None else open_store(Settings().store_root).manifest(ref.bare()).inputs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A finished run."""
    return finished(tmp_path_factory.mktemp("trained") / "home", SETTINGS)


@pytest.fixture
def run(trained: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Its copy, where ppoflow keeps its state."""
    return trained.own_copy(tmp_path / "home", monkeypatch)


def check(name: str = "toy") -> Findings:
    """What is found, without a word on the way."""
    return check_run(name, lambda text: None)


def damaged(name: str = "toy") -> list[str]:
    """What is damaged, and how it is repaired."""
    return [f"{damage.what}: {damage.repair}" for damage in check(name).damages]


def test_a_whole_run_is_read_to_its_last_byte_and_left_alone(run: ToyRun) -> None:
    before = snapshot(run.home)
    found = check()
    assert (found.damages, found.records) == ([], 5)
    refs = {(ref.kind, ref.digest): ref for record in run.records() for ref in made_by(record)}
    read = {(place.parent.name, place.name) for ref in refs.values() for place in [run.place(ref)]}
    assert found.artifacts >= len(read)
    assert found.bytes >= sum(size_of(run.home / "store" / kind / key) for kind, key in read)
    assert snapshot(run.home) == before


def made_by(record: object) -> list[ArtifactRef]:
    """The references in a record."""
    return [value for value in vars(record).values() if isinstance(value, ArtifactRef)]


def size_of(folder: Path) -> int:
    """Of an artifact's files."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_artifact_however_damaged_is_made_again_to_the_same_bytes(
    run: ToyRun, made: str, damage: Callable[[Path], None]
) -> None:
    ref = MADE[made](run)
    assert ref is not None
    before, records = snapshot(run.place(ref)), run.record_bytes()
    damage(run.place(ref))
    found = check()
    (told,) = found.damages
    assert (told.repair, told.ref) == ("artifact", ref)
    assert told.what.startswith(ref.kind)
    assert "`ppoflow fsck toy --repair` makes it again" in told.remedy
    context = run.context()
    lines = remake(context, run.console(), [(told.iteration, told.ref)])
    assert f"{ref.kind} of iteration {told.iteration} is undamaged again, with the same digest" in lines
    context.lease.release()
    assert check().damages == []
    manifest = "manifest.json"  # it says when it was made
    assert {n: b for n, b in snapshot(run.place(ref)).items() if n != manifest} == {
        n: b for n, b in before.items() if n != manifest
    }
    assert run.record_bytes() == records


def test_a_lost_spec_is_written_again(run: ToyRun) -> None:
    spec = run.folder / "spec.json"
    before = spec.read_bytes()
    for damage in (spec.unlink, lambda: replace(spec, before[:-9]), lambda: run.rewrite("spec.json", other_seed)):
        damage()
        assert damaged() == ["spec: spec"]
        assert repair_records("toy") == ["the spec of run toy is written again"]
        assert spec.read_bytes() == before
        assert damaged() == []


def other_seed(spec: dict[str, object]) -> dict[str, object]:
    """The spec with one."""
    return spec | {"seed": 99}


@pytest.mark.parametrize("iteration", [0, 2, 4])
@pytest.mark.parametrize("how", ["lost", "cut short", "another run's"])
def test_records_from_the_damaged_one_on_are_taken_out_and_made_again_from_stored_stages(
    run: ToyRun, iteration: int, how: str
) -> None:
    before, file = digests(run.records()), run.folder / f"iterations/{iteration:06d}.json"
    if how == "lost":
        file.unlink()
    elif how == "cut short":
        replace(file, file.read_bytes()[:-5])
    else:
        run.rewrite(f"iterations/{iteration:06d}.json", lambda record: record | {"run": "other"})
    found = check()
    assert [(told.repair, told.iteration) for told in found.damages] == [("records", iteration)]
    taken = [str(n) for n in range(iteration, 5) if n != iteration or how != "lost"]
    (line,) = repair_records("toy")
    if taken:
        assert line.startswith(f"iterations {', '.join(taken)} are taken out of run toy and kept aside")
        assert line.endswith("`ppoflow resume toy` makes them again")
    else:
        assert line == "iteration 3 is the last one of run toy now: `ppoflow resume toy` goes on from it"
    assert damaged() == []
    run.train()
    assert digests(run.records()) == before
    assert set(run.engines.done) <= {"describe_sources"}  # every stage came from the store


def test_where_one_of_two_records_was_written_over_both_are_taken_out(run: ToyRun) -> None:
    run.rewrite("iterations/000003.json", lambda record: record | {"next_kl_coef": 5.0})
    assert [told.iteration for told in check().damages] == [3]


def test_a_record_whose_artifacts_come_from_elsewhere_is_found(run: ToyRun) -> None:
    """The last one is named by no other: what its checkpoint was made from tells."""
    other = run.records()[3].made("experience")
    assert other is not None
    run.rewrite("iterations/000004.json", lambda record: with_artifact(record, "compute_advantages", other))
    assert ("record of iteration 4: records") in damaged()


def other_best(record: dict[str, Any]) -> dict[str, Any]:
    """The best policy is said to be another one."""
    told = record["best"]["checkpoint"]
    others = (record["reference"], record["artifacts"]["update_policy"])
    other = next(ref for ref in others if ref["digest"] != told["digest"])
    return record | {"best": record["best"] | {"checkpoint": other}}


def higher_score(record: dict[str, Any]) -> dict[str, Any]:
    """So high that it is the best."""
    score = {"evaluation/score": 99.0}
    artifacts = {
        name: ref | {"metrics": ref["metrics"] | score} if name == "evaluate_policy" else ref
        for name, ref in record["artifacts"].items()
    }
    best = {"metric": "evaluation/score", "iteration": 4, "value": 99.0}
    best |= {"checkpoint": record["artifacts"]["update_policy"]}
    return record | {"metrics": record["metrics"] | score, "best": best, "artifacts": artifacts}


FORGED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "position": (lambda record: record | {"position": 0}, "its position is 0, and "),
    "cursor": (lambda record: record | {"epoch": 7}, "its cursor is (7, "),
    "KL coefficient": (lambda record: record | {"next_kl_coef": 9.0}, "its next_kl_coef is 9.0, and "),
    "metric": (
        lambda record: record | {"metrics": record["metrics"] | {"score/mean": 99.0}},
        "its score/mean is 99.0, and ",
    ),
    "score": (higher_score, "it does not say of its evaluation what stats.json there says"),
    "best value": (lambda record: record | {"best": record["best"] | {"value": 99.0}}, "its best is "),
    "best policy": (other_best, "its best is "),
    "rates": (lambda record: record | {"rate_factor": 100.0}, "its attempt is {'number': 0, 'rate_factor': 100.0}"),
    "rollbacks": (lambda record: record | {"attempt": 3}, "its attempt is {'number': 3"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_last_record_that_says_what_does_not_follow_is_taken_out_and_made_again(run: ToyRun, forged: str) -> None:
    """The last one is named by no other."""
    before, (change, complaint) = told_by(run.records()[4]), FORGED[forged]
    run.rewrite("iterations/000004.json", change)
    assert told_by(run.records()[4]) != before
    damages = check().damages
    assert {(told.what, told.repair) for told in damages} == {("record of iteration 4", "records")}
    assert any(told.complaint.startswith(complaint) for told in damages)
    assert repair_records("toy")[0].startswith("iterations 4 are taken out of run toy")
    assert told_by(run.train()[4]) == before
    assert check().damages == []


def told_by(record: IterationRecord) -> list[object]:
    """What follows from what a record was made from."""
    best = (record.best.iteration, record.best.value, record.best.checkpoint.digest)
    score = record.metrics["score/mean"]
    return [record.position, record.cursor, record.next_kl_coef, record.attempt_settings, best, score]


def test_it_waits_for_nobody(run: ToyRun) -> None:
    """A run that another process has is read, and not repaired."""
    (run.folder / "iterations/000002.json").unlink()
    lease = acquire_lease(run.home / "store", "toy")
    found = check()
    assert [told.repair for told in found.damages] == ["records"]
    with pytest.raises(LeaseHeld):
        repair_records("toy")
    lease.release()


def test_the_copy_of_the_best_policy_is_read_too(run: ToyRun) -> None:
    context = run.context()
    copy = export_best(context, run.records()[-1].best)
    assert damaged() == []
    flip_a_bit(copy)
    assert damaged() == ["copy of the best policy: copy"]
    remake(context, run.console(), [])
    assert damaged() == []


def test_what_no_run_needs_is_read_as_well_and_set_aside(run: ToyRun) -> None:
    shutil.rmtree(run.folder)
    everything = list(check_store(lambda text: None))
    assert [(found.run, found.damages) for found in everything] == [(None, [])]
    assert everything[0].artifacts > 10
    ref = next(path for path in (run.home / "store" / "scores").iterdir())
    flip_a_bit(ref)
    (rest,) = check_store(lambda text: None)
    assert [(told.what, told.repair) for told in rest.damages] == [(f"scores/{ref.name}", "set aside")]


def test_an_unknown_run_is_refused_with_those_there_are(run: ToyRun) -> None:
    with pytest.raises(InputError, match=r"there is no run nobody .*runs there: toy"):
        check("nobody")


def test_the_command_says_what_is_damaged_and_by_which_command_it_is_made_again(run: ToyRun) -> None:
    cli = CliRunner()
    assert cli.invoke(app, ["fsck", "toy"]).exit_code == 0
    assert "5 records" in cli.invoke(app, ["fsck"]).output
    (run.folder / "spec.json").unlink()
    (run.folder / "iterations/000003.json").unlink()
    told = cli.invoke(app, ["fsck", "toy"])
    assert told.exit_code == 1
    assert "! spec: run toy has lost its spec" in told.output
    assert "`ppoflow fsck toy --repair` writes it again" in told.output
    assert "`ppoflow fsck toy --repair` takes iteration 3 and those after it out of the run" in told.output
    repaired = cli.invoke(app, ["fsck", "toy", "--repair"])
    assert repaired.exit_code == 0, repaired.output
    assert "the spec of run toy is written again" in repaired.output
    assert "3 records" in repaired.output.splitlines()[-1]


@pytest.mark.thorough
def test_reading_while_runs_write_finds_nothing_that_is_not_there(run: ToyRun) -> None:
    """Rollbacks take records out, and retention takes checkpoints, while everything is read."""
    writing = ToyRun(run.home, ("iterations=15", "dataset.evaluation=null", "checkpoint.keep_last=1"), name="busy")
    thread = threading.Thread(target=writing.train)
    thread.start()
    looks = 0
    while thread.is_alive() or looks == 0:
        if "busy" in open_runs(run.home / "store").names():
            assert check("busy").damages == []
            looks += 1
        assert check().damages == []
    thread.join()
    assert len(writing.records()) == 16
