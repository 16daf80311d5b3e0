"""Iterations: what they commit, and that neither a death nor sparse checkpoints change a byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from infra.engines.protocol import EngineDied, EngineJob, EngineJobError
from ppo_core.training.state import read_state
from tests.tasks.toy_engines import HELD_OUT, ToyEngines
from tests.tasks.toy_runs import ToyRun, digests, killed

pytestmark = pytest.mark.usefixtures("prefect_server")
WITHOUT_EVALUATION = ("dataset.evaluation=null", "registry.metric=score/mean")
SPARSE = (*WITHOUT_EVALUATION, "iterations=7", "checkpoint.every=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run of three iterations that nothing has disturbed."""
    run = ToyRun(tmp_path_factory.mktemp("whole"), ("iterations=3",))
    run.train()
    return run


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run of seven iterations, each with a full checkpoint."""
    run = ToyRun(tmp_path_factory.mktemp("dense"), (*WITHOUT_EVALUATION, "iterations=7"))
    run.train()
    return run


def work(run: ToyRun) -> list[str]:
    """The jobs that make artifacts, in order."""
    return [job for job in run.engines.done if job != "describe_sources"]


def test_a_run_is_the_same_wherever_it_is_made(whole: ToyRun, tmp_path: Path) -> None:
    again = ToyRun(tmp_path, whole.overrides, name="another")
    assert digests(again.train()) == digests(whole.records())
    assert [(r.iteration, r.position, r.attempt) for r in again.records()] == [
        (0, 0, 0),
        (1, 32, 0),
        (2, 64, 0),
        (3, 96, 0),
    ]
    assert len(set(again.policies())) == 4
    assert again.tracker.steps("seconds/iteration") == [0, 1, 2, 3]


def test_what_a_stage_carries_on_reaches_it_in_the_next_iteration(whole: ToyRun) -> None:
    """The toy engine counts; that a death changes no digest, below, holds for what is carried too: it is hashed."""
    carried = [record.carried().get("compute_advantages", {}) for record in whole.records()]
    assert carried == [{}, {"iterations": 1.0}, {"iterations": 2.0}, {"iterations": 3.0}]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("advantages.kl={kind: adaptive, target: 6}",), [(0, None, False), (0, None, True), (0, None, True)]),
        (("advantages.kl={coef: 0.1, schedule: linear}",), [(0, 2, False), (0, 2, True), (1, 2, True)]),
    ],
)
def test_the_kl_coefficient_waits_for_the_policy_while_the_critic_warms_up(
    tmp_path: Path, overrides: tuple[str, ...], told: list[tuple[int, int | None, bool]]
) -> None:
    """One iteration of warm-up, of three: a coefficient's schedule has two, and its adaptation begins with them."""
    run = ToyRun(tmp_path, (*WITHOUT_EVALUATION, "iterations=3", "update.critic_warmup_iterations=1", *overrides))
    compute, seen = run.engines.jobs["compute_advantages"], []

    def looked_at(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
        seen.append(tuple(job.spec[name] for name in ("iteration", "decay_iterations", "trains_policy")))
        return compute(engines, job)

    run.engines.jobs["compute_advantages"] = looked_at
    run.train()
    assert seen == told


@pytest.mark.parametrize("job", ["score_rollouts", "score_evaluation"])
def test_scores_that_failed_are_asked_for_again_and_in_the_end_end_the_run(
    whole: ToyRun, tmp_path: Path, job: str
) -> None:
    """As where too many responses have none: an evaluation is no other stage than training's."""

    def fails() -> NoReturn:
        raise EngineJobError("RewardFailed: too few", retryable=True, error_type="RewardFailed")

    run = ToyRun(tmp_path, whole.overrides)
    for number in (2, 3, 4):  # all tries of one iteration
        run.engines.before(job, number, fails)
    with pytest.raises(EngineJobError, match="too few"):
        run.train()
    assert run.engines.asked[job] == 4
    done = run.records()
    run.engines.before(job, 1, fails)
    assert digests(run.train()) == digests(whole.records())
    assert digests(run.records()[: len(done)]) == digests(done)


@pytest.mark.parametrize("every", [1, 3])
def test_a_setting_that_the_algorithm_moves_goes_on_also_after_a_death(tmp_path: Path, every: int) -> None:
    """The toy engine doubles the coefficient with each update; between full checkpoints a cold engine replays two."""
    overrides = (*WITHOUT_EVALUATION, "iterations=4", f"checkpoint.every={every}", "algorithm.kind=kl_penalty_ppo")
    whole, run = ToyRun(tmp_path / "whole", overrides), ToyRun(tmp_path / "killed", overrides)
    coefficients = [record.carried().get("update_policy", {}).get("coef") for record in whole.train()]
    assert coefficients == [None, 2.0, 4.0, 8.0, 16.0]
    run.engines.before("update_policy", 3, killed)
    run.train_until_killed()
    assert digests(run.train()) == digests(whole.records())


@pytest.mark.parametrize(
    ("job", "number"),
    [
        ("finetune_policy", 1),
        ("start_policy", 1),
        ("generate_rollouts", 2),
        ("score_rollouts", 2),
        ("compute_advantages", 2),
        ("update_policy", 2),
        (HELD_OUT, 3),
        (HELD_OUT, 4),
        ("score_evaluation", 2),
    ],
)
def test_killed_before_any_job_the_next_process_does_that_one_and_none_twice(
    job: str, number: int, whole: ToyRun, tmp_path: Path
) -> None:
    run = ToyRun(tmp_path, whole.overrides)
    run.engines.before(job, number, killed)
    run.train_until_killed()
    before = run.record_bytes()
    assert digests(run.train()) == digests(whole.records())
    assert run.policies() == whole.policies()
    assert work(run) == work(whole)
    assert {name: run.record_bytes()[name] for name in before} == before


def test_a_run_of_another_name_takes_everything_from_the_store(whole: ToyRun, tmp_path: Path) -> None:
    run = whole.copy(tmp_path / "copy")
    run.name = "second"
    assert digests(run.train()) == digests(whole.records())
    assert work(run) == []
    stages = {"generate_rollouts", "score_rollouts", "compute_advantages", "update_policy"}
    assert stages <= set(run.records()[1].cached_stages)
    assert run.records()[1].lease == 1


def test_a_longer_run_goes_on_after_the_last_iteration(whole: ToyRun, tmp_path: Path) -> None:
    run = whole.copy(tmp_path / "copy")
    before = run.record_bytes()
    assert [record.iteration for record in run.train("iterations=5")] == [0, 1, 2, 3, 4, 5]
    assert {name: run.record_bytes()[name] for name in before} == before
    assert run.records()[4].changed == {"iterations": 5}
    assert run.engines.count("update_policy") == 2


def test_an_engine_that_dies_costs_one_retry_and_no_byte(whole: ToyRun, tmp_path: Path) -> None:
    def dies() -> None:
        raise EngineDied("engine 'training' was killed by signal 9")

    run = ToyRun(tmp_path, whole.overrides)
    run.engines.before("update_policy", 2, dies)
    assert digests(run.train()) == digests(whole.records())
    assert run.engines.asked["update_policy"] == 4


def test_sparse_checkpoints_give_the_same_policies_as_full_ones(dense: ToyRun, tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SPARSE)
    records = run.train()
    assert run.policies() == dense.policies()
    assert [record.checkpoint.full for record in records] == [True, False, False, True, False, False, True, True]
    for ours, theirs in zip(records, dense.records(), strict=True):
        state, full = read_state(run.place(ours.checkpoint)), read_state(dense.place(theirs.checkpoint))
        assert state.identity == full.identity
        assert (ours.checkpoint.digest == theirs.checkpoint.digest) is ours.checkpoint.full
        parts = {path.name for path in run.place(ours.checkpoint).iterdir()} & {"policy", "critic", "optimizer"}
        assert parts == ({"policy", "critic", "optimizer"} if ours.checkpoint.full else {"policy"})
    evidence = [(r.made("rollouts"), r.made("scores"), r.made("experience")) for r in records[1:]]
    assert [[ref and ref.digest for ref in refs] for refs in evidence] == [
        list(made[:3]) for made in digests(dense.records())[1:]
    ]


def test_a_thin_record_says_what_it_takes_to_have_the_training_state_again(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SPARSE)
    records = run.train()
    assert [sorted(record.restoration()) for record in records] == [
        [],
        ["base", "reference", "replay_0"],
        ["base", "reference", "replay_0", "replay_1"],
        [],
        ["base", "reference", "replay_0"],
        ["base", "reference", "replay_0", "replay_1"],
        [],
        [],
    ]
    given, experiences = records[5].restoration(), [record.made("experience") for record in records]
    assert given["base"] == records[3].checkpoint.bare()
    assert [given["replay_0"], given["replay_1"]] == [ref.bare() for ref in experiences[4:6] if ref is not None]


@pytest.mark.parametrize("number", [2, 3, 4, 6])
def test_resumed_amid_thin_checkpoints_a_run_replays_and_is_the_same(
    number: int, dense: ToyRun, tmp_path: Path
) -> None:
    run = ToyRun(tmp_path, SPARSE)
    run.engines.before("update_policy", number, killed)
    run.train_until_killed()
    since = (number - 1) % 3  # updates since the last full checkpoint
    run.engines.notes.clear()
    run.train()
    assert run.policies() == dense.policies()
    assert run.engines.notes[:since] == [f"replaying update {n + 1} of {since}" for n in range(since)]
    assert run.engines.count("update_policy") == 7
    assert run.engines.count("generate_rollouts") == 7


def test_a_machine_that_replays_to_other_weights_says_so_and_changes_nothing(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, SPARSE)
    run.engines.before("generate_rollouts", 3, killed)
    run.train_until_killed()
    before = run.record_bytes()
    run.engines.salts["update_policy"] = "another kind of CPU"
    with pytest.raises(ValueError, match="the 2 updates since the last full checkpoint give other policy weights"):
        run.train()
    assert run.record_bytes() == before
