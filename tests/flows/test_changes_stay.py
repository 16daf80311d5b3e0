"""What has changed of a run's spec stays, although the records that told it are taken out: they were to come again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.iteration import Rerun
from infra.runs.records import RecordCorrupted
from tasks.runs.fsck import check_run
from tasks.runs.repair import repair_records
from tasks.runs.run_state import spec_to_go_on
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import Killed, ToyRun, killed, replace

pytestmark = pytest.mark.usefixtures("prefect_server")
LONGER = ("iterations=6", "guards.on_divergence=rollback", "guards.max_kl=5", "guards.rollback_iterations=2")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run of two iterations that was gone on with to six, under guards."""
    run = ToyRun(tmp_path_factory.mktemp("extended"), ("iterations=2",))
    run.train()
    run.train(*LONGER)
    return run


@pytest.fixture
def run(extended: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    return extended.own_copy(tmp_path / "copy", monkeypatch)


def goes_on(run: ToyRun) -> None:
    """`ppoflow resume`, which ends where the run was last asked to end."""
    spec = spec_to_go_on("toy")
    assert (spec.iterations, spec.guards.on_divergence, spec.guards.max_kl) == (6, "rollback", 5)
    assert len(run.train(spec=spec)) == 7


def rerun_killed(run: ToyRun, iteration: int = 1) -> None:
    run.code = "newer"  # so that nothing comes from the store
    run.engines.before("update_policy", 1, killed)
    with pytest.raises(Killed):
        run.train(spec=spec_to_go_on("toy"), rerun=Rerun(iteration=iteration, start="update"))


def damaged_and_repaired(run: ToyRun, iteration: int = 2) -> None:
    record = run.folder / "iterations" / f"{iteration:06d}.json"
    replace(record, record.read_bytes()[:-9])
    with pytest.raises(RecordCorrupted):
        spec_to_go_on("toy")
    repair_records("toy")


def both(run: ToyRun) -> None:
    rerun_killed(run, 2)
    damaged_and_repaired(run, 1)


def repaired_without_a_spec(run: ToyRun) -> None:
    """Nobody knows then what the run began with."""
    (run.folder / "spec.json").unlink()
    replace(run.folder / "iterations" / "000000.json", b"{")
    repair_records("toy")


@pytest.mark.parametrize("broken", [rerun_killed, damaged_and_repaired, both])
def test_a_longer_run_gets_all_of_its_iterations_again(
    broken: Callable[[ToyRun], None], run: ToyRun, extended: ToyRun
) -> None:
    broken(run)
    assert len(run.records()) < 3
    goes_on(run)
    assert run.policies() == extended.policies()
    assert check_run("toy", lambda line: None).damages == []


def test_rolled_back_to_before_the_change_and_killed_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ToyRun(tmp_path / "begun", ("iterations=2",))
    begun.train()
    run = begun.own_copy(tmp_path / "copy", monkeypatch)
    run.engines = ToyEngines(lambda iteration, rate_factor: {"kl/reference": 9.0})
    run.engines.before("generate_rollouts", 2, killed)
    run.train_until_killed(*LONGER)
    assert [record.iteration for record in run.records()] == [0]
    run.engines = ToyEngines()
    goes_on(run)


def test_what_has_neither_spec_nor_start_is_repaired_to_begin_anew(run: ToyRun) -> None:
    repaired_without_a_spec(run)
    assert run.records() == []
    assert len(run.train(*LONGER)) == 7


def test_without_a_change_nothing_is_noted(run: ToyRun) -> None:
    run.train(spec=spec_to_go_on("toy"), rerun=Rerun(iteration=5, start="score"))
    assert run.notes("changes") == []


def test_a_note_counts_until_the_next_record(run: ToyRun) -> None:
    rerun_killed(run)
    (note,) = run.notes("changes")
    assert note["after"] == 0
    assert run.train("iterations=3")[-1].iteration == 3
    assert spec_to_go_on("toy").iterations == 3
