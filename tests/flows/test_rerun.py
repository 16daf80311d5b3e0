"""Rerun: a stage of an iteration and what follows it are done again; what was made before it is taken as it is."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from flows.iteration import Rerun, StageName
from ppo_core.records import InputError
from tasks.runs.run_state import require_rerunnable, spec_to_go_on
from tests.tasks.toy_engines import HELD_OUT, ToyEngines
from tests.tasks.toy_runs import Killed, ToyRun, digests, flip_a_bit, killed

STAGES: tuple[StageName, ...] = get_args(StageName)
pytestmark = pytest.mark.usefixtures("prefect_server")
JOBS = {
    "generate": ["generate_rollouts"],
    "score": ["score_rollouts"],
    "advantages": ["compute_advantages"],
    "update": ["update_policy"],
    "evaluate": [HELD_OUT, HELD_OUT, "score_evaluation"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run of three iterations, each evaluated."""
    run = ToyRun(tmp_path_factory.mktemp("finished"), ("iterations=3", "evaluation.every=1"))
    run.train()
    return run


def again(run: ToyRun, start: StageName, iteration: int = 2) -> list[str]:
    """The jobs of a rerun, from the iteration's own on."""
    run.train(rerun=Rerun(iteration=iteration, start=start))
    return [job for job in run.engines.done if job not in ("describe_sources", "prepare_dataset")]


@pytest.mark.parametrize("start", STAGES)
def test_after_the_code_has_changed_the_stages_before_are_not_done_again(
    start: StageName, finished: ToyRun, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "copy")
    run.code = "newer"  # so that nothing comes from the store
    done = again(run, start)
    later = STAGES[STAGES.index(start) :]
    assert done == [job for stage in (*later, *STAGES) for job in JOBS[stage]]
    assert digests(run.records()) == digests(finished.records())  # the newer code computes the same
    assert "taken out of the run: [3, 2]" in run.said


def test_by_its_name_a_run_goes_on_to_where_it_was_asked_to(
    finished: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `resume` and `rerun` take for its spec: a run that got more iterations, and was interrupted, gets them."""
    run = finished.copy(tmp_path / "copy")
    monkeypatch.setenv("PPOFLOW_HOME", str(run.home))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    assert spec_to_go_on("toy").iterations == 3
    run.engines.before("update_policy", 2, killed)
    run.train_until_killed("iterations=7", "checkpoint.every=2")
    spec = spec_to_go_on("toy", "elsewhere")
    assert (spec.iterations, spec.checkpoint.every, spec.folder) == (7, 2, "elsewhere")
    spec = spec_to_go_on("toy")
    assert len(run.train(spec=spec, rerun=Rerun(iteration=2, start="score"))) == 8


def test_another_reward_function_changes_the_scores_and_what_follows(finished: ToyRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "copy")
    before = run.record_bytes()
    run.engines.reward = "stricter"
    done = again(run, "score")
    old, new = digests(finished.records()), digests(run.records())
    assert new[:2] == old[:2]
    assert new[2][0] == old[2][0]  # the samples
    assert all(ours != theirs for ours, theirs in zip(new[2][1:] + new[3], old[2][1:] + old[3], strict=True))
    assert done[0] == "score_rollouts"
    assert done.count("generate_rollouts") == 1
    kept = {path.name: path.read_bytes() for path in run.folder.glob("leases/*/superseded/*.json")}
    assert kept == {name: before[name] for name in ("000002.json", "000003.json")}
    assert {record.lease for record in run.records()} == {1, 2}


@pytest.mark.parametrize("start", STAGES)
def test_with_the_same_code_everything_comes_from_the_store(start: StageName, finished: ToyRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "copy")
    assert again(run, start) == []
    assert digests(run.records()) == digests(finished.records())


def test_its_new_values_are_reported_beside_the_old_ones(finished: ToyRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "copy")
    run.tracker.points = set(finished.tracker.points)
    run.engines.reward = "stricter"
    again(run, "score")
    values = {point.value for point in run.tracker.points if (point.key, point.step) == ("score/mean", 2)}
    assert values == {records[2].metrics["score/mean"] for records in (finished.records(), run.records())}
    assert run.tracker.steps("score/mean") == [1, 2, 2, 3, 3]


def test_killed_in_the_middle_the_next_process_ends_it(finished: ToyRun, tmp_path: Path) -> None:
    run, undisturbed = finished.copy(tmp_path / "killed"), finished.copy(tmp_path / "undisturbed")
    run.engines.reward = undisturbed.engines.reward = "stricter"
    run.engines.before("update_policy", 1, killed)
    with pytest.raises(Killed):
        again(run, "score")
    assert [record.iteration for record in run.records()] == [0, 1]
    run.train()
    again(undisturbed, "score")
    assert digests(run.records()) == digests(undisturbed.records())
    assert run.engines.count("generate_rollouts") == 1  # iteration 3's alone


def test_what_it_takes_from_the_record_is_made_again_where_it_is_damaged(finished: ToyRun, tmp_path: Path) -> None:
    run, undisturbed = finished.copy(tmp_path / "damaged"), finished.copy(tmp_path / "undisturbed")
    rollouts = run.records()[2].made("rollouts")
    assert rollouts is not None
    flip_a_bit(run.place(rollouts))
    run.engines.reward = undisturbed.engines.reward = "stricter"
    again(run, "score")
    again(undisturbed, "score")
    assert digests(run.records()) == digests(undisturbed.records())
    assert "rollouts of iteration 2 is undamaged again, with the same digest" in run.said


def test_without_what_it_starts_from_nothing_is_taken_out_of_the_run(finished: ToyRun, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "copy")
    before = run.record_bytes()
    flip_a_bit(run.place(run.records()[1].checkpoint))
    run.engines.salts["update_policy"] = "another kind of CPU"
    with pytest.raises(InputError, match="iteration 2 cannot be done again: what it starts from cannot be had"):
        again(run, "score")
    assert run.record_bytes() == before


def test_amid_thin_checkpoints_it_replays(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, ("iterations=4", "checkpoint.every=3", "evaluation.every=4"))
    old = digests(run.train())
    run.code = "newer"
    run.engines.notes.clear()
    again(run, "advantages")
    assert run.engines.notes[0] == "replaying update 1 of 1"
    assert digests(run.records()) == old


def test_a_stage_that_comes_from_the_store_is_told(finished: ToyRun, tmp_path: Path) -> None:
    """Nobody can see that a reward server gives other scores: its answers are in no key."""
    run = finished.copy(tmp_path / "copy")
    assert again(run, "score") == []
    assert "! stage score of iteration 2 was found in the store and not computed again" in run.said
    run.engines.reward = "stricter"
    again(run, "score")
    assert run.said.count("was found in the store") == 1


def better_and_better(iteration: int, rate_factor: float) -> dict[str, float]:
    """The last one is the best."""
    return {"policy/quality": float(iteration)}


@pytest.mark.parametrize(("every", "kept"), [([], False), (["checkpoint.keep_every=2"], True)])
def test_from_what_retention_has_let_go_nothing_is_begun(
    every: list[str], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 4 starts from 3, which is made again where 2 is kept."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    thinned = ("iterations=5", "dataset.evaluation=null", "registry.metric=policy/quality", "checkpoint.keep_last=1")
    run = ToyRun(tmp_path, (*thinned, *every), engines=ToyEngines(better_and_better))
    run.train()
    assert not run.place(run.records()[3].checkpoint).exists()
    if not kept:
        expected = r"iteration 4 of run toy starts from the checkpoint of iteration 3, which is not kept .*: rerun an"
        with pytest.raises(InputError, match=expected):
            require_rerunnable("toy", 4)
        return
    require_rerunnable("toy", 4)
    before = digests(run.records())
    run.train(rerun=Rerun(iteration=4, start="score"))
    assert digests(run.records()) == before
