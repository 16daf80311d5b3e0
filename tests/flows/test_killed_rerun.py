"""A rerun whose process died, at any point, is finished by the next start of the run, and done once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.iteration import Rerun
from infra.runs.records import RecordCorrupted
from ppo_core.records import InputError
from tasks.runs.fork import fork_run
from tasks.runs.fsck import check_run
from tasks.runs.notes import pending_rerun
from tasks.runs.run_state import require_rerunnable
from tests.flows.test_rollback import GUARDED
from tests.infra.storage.faulty_files import Died
from tests.infra.storage.s3.faulty_objects import FaultyObjects
from tests.infra.storage.s3.memory_objects import MemoryObjects
from tests.tasks.bucket_runs import BucketRun
from tests.tasks.run_contexts import QuickFiles
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import Killed, ToyRun, digests, flip_a_bit, killed, replace

pytestmark = pytest.mark.usefixtures("prefect_server")
ASKED = Rerun(iteration=2, start="score")


class DyingFiles(QuickFiles):
    """The process dies right after it has put a file of this name, or name of a folder and a file, in its place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._die(target)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._die(target)

    def _die(self, target: Path) -> None:
        if target.as_posix().endswith(self.name):
            raise Killed


DEATHS: dict[str, Callable[[ToyRun], None]] = {
    "noted": lambda run: dies_after(run, "reruns/000001.json"),
    "half taken out": lambda run: dies_after(run, "superseded/000003.json"),
    "taken out": lambda run: dies_after(run, "superseded/000002.json"),
    "scored": lambda run: run.engines.before("compute_advantages", 1, killed),
    "committed": lambda run: dies_after(run, "iterations/000002.json"),
    "ended": lambda run: dies_after(run, "reruns/000002.json"),
}


def dies_after(run: ToyRun, name: str) -> None:
    run.files = DyingFiles(name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run of four iterations."""
    run = ToyRun(tmp_path_factory.mktemp("finished"), ("iterations=4", "evaluation.every=4"))
    run.train()
    return run


def changed(finished: ToyRun, home: Path) -> ToyRun:
    """Its copy, with another reward function, and of a version that finds nothing in the store."""
    run = finished.copy(home)
    run.engines.reward, run.code = "stricter", "newer"
    return run


@pytest.fixture
def expected(finished: ToyRun, tmp_path: Path) -> list[tuple[str | None, ...]]:
    """What an undisturbed rerun leaves."""
    return digests(changed(finished, tmp_path / "undisturbed").train(rerun=ASKED))


def die(run: ToyRun, death: str) -> None:
    """Begin the rerun, and die."""
    DEATHS[death](run)
    with pytest.raises(Killed):
        run.train(rerun=ASKED)
    run.files = QuickFiles()


@pytest.fixture
def run(finished: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRun:
    """Where commands find it."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "killed"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    return changed(finished, tmp_path / "killed")


@pytest.mark.parametrize("death", DEATHS)
def test_the_next_start_finishes_it(death: str, run: ToyRun, expected: list[tuple[str | None, ...]]) -> None:
    die(run, death)
    assert check_run("toy", lambda text: None).damages == []
    assert digests(run.train()) == expected
    assert run.engines.count("generate_rollouts") == 2  # of iterations 3 and 4 alone
    assert run.engines.count("score_rollouts") == 3
    assert check_run("toy", lambda text: None).damages == []


@pytest.mark.thorough
@pytest.mark.parametrize("death", DEATHS)
def test_a_flow_run_that_is_started_again_does_it_once(
    death: str, run: ToyRun, expected: list[tuple[str | None, ...]]
) -> None:
    run.flow_run = "f-1"
    die(run, death)
    require_rerunnable("toy", 2, "f-1")
    run.engines.before("update_policy", 1 if death in ("committed", "ended") else 2, killed)
    with pytest.raises(Killed):
        run.train(rerun=ASKED)  # in iteration 3
    done = run.record_bytes()["000002.json"]
    assert digests(run.train(rerun=ASKED)) == expected
    assert run.record_bytes()["000002.json"] == done
    assert run.engines.count("score_rollouts") == 3
    run.flow_run = "f-2"
    assert digests(run.train(rerun=ASKED)) == expected
    assert run.record_bytes()["000002.json"] != done  # another one, which asked for itself


@pytest.mark.parametrize("death", ["noted", "taken out", "scored"])
def test_the_same_command_again_finishes_it(death: str, run: ToyRun, expected: list[tuple[str | None, ...]]) -> None:
    die(run, death)
    require_rerunnable("toy", 2)
    assert digests(run.train(rerun=ASKED)) == expected
    assert run.engines.count("score_rollouts") == 3
    assert run.said.count("rerunning iteration 2 from stage score") == (2 if death == "scored" else 1)


def test_an_iteration_that_no_rerun_took_out_is_none(run: ToyRun) -> None:
    die(run, "taken out")
    with pytest.raises(InputError, match=r"run toy has no iteration 3: it has 0\.\.1"):
        require_rerunnable("toy", 3, "f-1")
    run.train()
    with pytest.raises(InputError, match=r"run toy has no iteration 5: it has 0\.\.4"):
        require_rerunnable("toy", 5)


def test_another_rerun_comes_after_the_pending_one(run: ToyRun, expected: list[tuple[str | None, ...]]) -> None:
    die(run, "taken out")
    assert digests(run.train(rerun=Rerun(iteration=1, start="update")))[3:] == expected[3:]
    assert [(note["iteration"], note["start"], note["ended"]) for note in run.notes("reruns")] == [
        (iteration, start, ended) for iteration, start in ((2, "score"), (1, "update")) for ended in (False, True)
    ]


def test_what_a_pending_rerun_takes_is_no_garbage(run: ToyRun) -> None:
    old = run.records()[2]
    rollouts, scores = old.made("rollouts"), old.made("scores")
    assert rollouts is not None
    assert scores is not None
    die(run, "taken out")
    context = run.context()
    needed = run.needs(context).of_all()
    assert {(ref.kind, ref.key) for ref in (rollouts, scores)} <= needed
    run.train()
    needed = run.needs(run.context()).of_all()
    assert (rollouts.kind, rollouts.key) in needed
    assert (scores.kind, scores.key) not in needed


def test_damaged_samples_are_made_again_though_their_record_is_out(
    run: ToyRun, expected: list[tuple[str | None, ...]]
) -> None:
    rollouts = run.records()[2].made("rollouts")
    assert rollouts is not None
    run.code = "toy"
    die(run, "taken out")
    flip_a_bit(run.place(rollouts))
    assert digests(run.train()) == expected
    assert "rollouts of iteration 2 is undamaged again, with the same digest" in run.said


def test_without_them_it_is_given_up_and_the_run_goes_on(run: ToyRun) -> None:
    rollouts = run.records()[2].made("rollouts")
    assert rollouts is not None
    die(run, "taken out")
    flip_a_bit(run.place(rollouts))
    run.engines.salts["generate_rollouts"] = "another kind of CPU"
    assert len(run.train()) == 5
    assert "! the rerun of iteration 2 is given up: what it starts from is damaged" in run.said
    assert [note["ended"] for note in run.notes("reruns")] == [False, True]


def test_a_run_that_goes_back_behind_it_later_does_not_take_it_up(run: ToyRun) -> None:
    die(run, "committed")
    run.train()
    context = run.context()
    assert pending_rerun(context.records) is None
    context.supersede(1)
    assert pending_rerun(context.records) is None
    run.train()
    assert run.said.count("rerunning iteration 2 from stage score") == 1


def test_a_rerun_that_diverges_is_over_once_the_run_went_back(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, GUARDED)
    run.train()
    bad = {"kl/reference": 9.0}
    run.code, run.engines = (
        "newer",
        ToyEngines(lambda iteration, factor: bad if (iteration, factor) == (2, 1.0) else {}),
    )
    run.files = DyingFiles("rollbacks/000001.json")
    with pytest.raises(Killed):
        run.train(rerun=ASKED)
    run.files = QuickFiles()
    records = run.train()
    assert records[2].attempt == 1
    assert run.said.count("rerunning iteration 2") == 1
    assert [note["ended"] for note in run.notes("reruns")] == [False, True]


def test_status_and_fork_know_a_run_amid_a_rerun(run: ToyRun) -> None:
    die(run, "taken out")
    told = CliRunner().invoke(app, ["status", "toy"]).output
    assert "iteration 2 is being done again from stage score; if its process died, the next start finishes that" in told
    fork_run("toy", 1, "branch", [], None)
    assert not (run.folder.parent / "branch" / "reruns").exists()


def test_a_note_that_was_written_over_is_told(run: ToyRun) -> None:
    die(run, "taken out")
    file = run.folder / "reruns" / "000001.json"
    replace(file, json.dumps({**json.loads(file.read_text()), "start": "update"}).encode())
    [damage] = check_run("toy", lambda text: None).damages
    assert damage.what == "notes of reruns"
    assert "move it away" in damage.complaint
    with pytest.raises(RecordCorrupted, match="move it away: a rerun that it tells of is not finished then"):
        run.train()
    file.rename(run.home / "aside.json")
    assert len(run.train()) == 5


@pytest.mark.thorough
def test_on_s3_the_same_is_true_of_every_change_of_the_run(tmp_path: Path) -> None:
    def begun(objects: FaultyObjects, home: Path) -> BucketRun:
        run = BucketRun(home, ("iterations=2", "evaluation.every=2"), objects=objects)
        run.train()
        run.code = "newer"
        return run

    objects = FaultyObjects(MemoryObjects())
    run = begun(objects, tmp_path / "undisturbed")
    start = len(objects.trace)
    made = digests(run.train(rerun=Rerun(iteration=1, start="score")))
    changes = [n for n, call in enumerate(objects.trace, 1) if n > start and call.startswith("replace")]
    assert len(changes) > 5
    for number in changes:
        stored = MemoryObjects()
        seam = FaultyObjects(stored, fault="dies after")
        dying = begun(seam, tmp_path / str(number))
        seam.arm(number - start)
        with pytest.raises(Died):
            dying.train(rerun=Rerun(iteration=1, start="score"))
        after = BucketRun(tmp_path / f"after {number}", dying.overrides, objects=stored, code="newer")
        assert digests(after.train()) == made, objects.trace[number - 1]
        noted = after.context().records.notes("reruns")
        assert [note["ended"] for note in noted] in ([], [False, True])
        taken_up = "rerunning iteration 1 from stage score" in dying.said + after.said
        assert taken_up == bool(noted)
