"""Damage: what going on needs is made again to the same bytes, or the run falls back to what is undamaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from flows.recovery import last_resumable_record, mend, spec_at
from infra.artifacts import ArtifactCorrupted, ArtifactRef
from infra.engines.protocol import EngineDied
from tasks.prepare_dataset import prepare_dataset
from tasks.register_policy import usable_best
from tasks.runs.iteration_record import IterationRecord
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import DAMAGES, ToyRun, digests, flip_a_bit, killed, lose_it

pytestmark = pytest.mark.usefixtures("prefect_server")
ALWAYS = ("dataset.evaluation=null", "registry.metric=policy/quality")
NEEDS: dict[str, Callable[[IterationRecord], ArtifactRef]] = {
    "reference": lambda record: record.reference,
    "best": lambda record: record.best.checkpoint,
    "base": lambda record: record.base or record.checkpoint,
    "first replay": lambda record: record.replay[0],
    "second replay": lambda record: record.replay[1],
    "checkpoint": lambda record: record.checkpoint,
}


def best_is_the_second(iteration: int, rate_factor: float) -> Mapping[str, float]:
    """Iteration 2 is the best of all."""
    return {"policy/quality": 9.0 if iteration == 2 else 1 / iteration}


def undisturbed(home: Path, *overrides: str) -> ToyRun:
    """A finished run."""
    run = ToyRun(home, (*ALWAYS, *overrides), engines=ToyEngines(best_is_the_second))
    run.train()
    return run


def stopped(home: Path, at: int, *overrides: str) -> ToyRun:
    """A run that was killed in an iteration."""
    run = ToyRun(home, (*ALWAYS, *overrides), engines=ToyEngines(best_is_the_second))
    run.engines.before("generate_rollouts", at, killed)
    run.train_until_killed()
    return run


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """Killed after iteration 5: goes back to checkpoint 3 and two updates; the best is the policy-only checkpoint 2."""
    return stopped(tmp_path_factory.mktemp("sparse"), 6, "iterations=6", "checkpoint.every=3")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """Killed after iteration 3, with full checkpoints."""
    return stopped(tmp_path_factory.mktemp("dense"), 4, "iterations=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """What becomes of `dense` where nothing is damaged."""
    return undisturbed(tmp_path_factory.mktemp("whole"), "iterations=4")


@pytest.mark.parametrize(
    ("need", "damage"),
    [
        *((need, flip_a_bit) for need in NEEDS),
        *((need, how) for need in ("base", "first replay") for how in DAMAGES[1:]),
    ],
)
def test_what_going_on_needs_is_made_again_to_the_same_bytes(
    need: str, damage: Callable[[Path], None], sparse: ToyRun, tmp_path: Path
) -> None:
    run = sparse.copy(tmp_path / "copy", best_is_the_second)
    before = run.record_bytes()
    ref = NEEDS[need](run.records()[-1])
    damage(run.place(ref))
    context = run.context()
    prepare_dataset(context)
    found = last_resumable_record(context, run.console())
    assert found is not None
    assert found.iteration == 5
    context.store.fetch(ref.bare())  # every byte is right
    assert run.record_bytes() == before
    assert "is undamaged again, with the same digest" in run.said
    assert (list((run.home / "store" / "damaged").glob("*")) == []) is (damage is lose_it)
    assert [job for job in run.engines.done if job != "describe_sources"] == [
        {"reference": "start_policy"}.get(need, "compute_advantages" if "replay" in need else "update_policy")
    ]


def test_without_the_best_policy_the_run_goes_on_and_the_best_that_is_left_takes_its_place(
    dense: ToyRun, tmp_path: Path
) -> None:
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    before, best = run.record_bytes(), run.records()[-1].best
    assert best.iteration == 2
    lose_it(run.place(best.checkpoint))
    run.engines.salts["update_policy"] = "another kind of CPU"
    run.train()
    assert "the best policy is lost; the best remaining one takes its place" in run.said
    assert "falling back" not in run.said
    after = run.record_bytes()
    assert {name: after[name] for name in before} == before
    context = run.context()
    usable = usable_best(context, run.records()[-1])
    assert usable.iteration != 2
    context.store.fetch(usable.checkpoint.bare())


def test_several_at_once_are_made_again_in_the_order_of_their_making(sparse: ToyRun, tmp_path: Path) -> None:
    run = sparse.copy(tmp_path / "copy", best_is_the_second)
    before = run.record_bytes()
    for need in NEEDS.values():
        lose_it(run.place(need(run.records()[-1])))
    records = run.train()
    assert [record.iteration for record in records] == [0, 1, 2, 3, 4, 5, 6]
    assert {name: run.record_bytes()[name] for name in before} == before
    assert run.policies()[6] == undisturbed(tmp_path / "other", "iterations=6").policies()[6]


def test_it_is_made_again_with_the_settings_of_its_time(dense: ToyRun, whole: ToyRun, tmp_path: Path) -> None:
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    before = run.record_bytes()
    flip_a_bit(run.place(run.records()[3].checkpoint))
    run.train("guards.max_skipped_steps=7", "training.microbatch_size=8")
    assert {name: run.record_bytes()[name] for name in before} == before
    assert "checkpoint of iteration 3 is undamaged again" in run.said


@pytest.mark.parametrize("part", ["checkpoint", "experience"])
def test_it_is_made_again_on_as_many_ranks_as_at_its_time(
    part: str, dense: ToyRun, whole: ToyRun, tmp_path: Path
) -> None:
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    before = run.record_bytes()
    ref = run.records()[3].made(part)
    assert ref is not None
    lose_it(run.place(ref))
    context = run.context("training.num_ranks=2")
    prepare_dataset(context)
    assert mend(context, run.console(), [(3, ref)]) is None
    context.store.fetch(ref.bare())
    assert run.record_bytes() == before
    assert run.engines.ranks == [2, 1, 2]  # what is done next has those of now


def test_where_the_engines_of_its_time_cannot_be_had_it_counts_as_lost(dense: ToyRun, tmp_path: Path) -> None:
    """On a machine with fewer GPUs, say: the run falls back then, and does not end."""
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    ref = run.records()[3].made("experience")
    assert ref is not None
    lose_it(run.place(ref))

    def no_such_engine() -> None:
        raise EngineDied("2 GPUs are here")

    context = run.context("training.num_ranks=2")
    prepare_dataset(context)
    for number in range(1, 9):
        run.engines.before("compute_advantages", number, no_such_engine)
    assert mend(context, run.console(), [(3, ref)]) == ref
    assert "the engines of iteration 3 cannot be had here any more: 2 GPUs are here" in run.said
    assert "experience of iteration 3 could not be made again" in run.said
    with pytest.raises(EngineDied):
        mend(run.context(), run.console(), [(3, ref)])


def test_where_engines_run_is_as_now_and_what_their_jobs_carry_as_then(dense: ToyRun, tmp_path: Path) -> None:
    run = dense.copy(tmp_path / "copy")
    then = {"engines.backend": "ray", "engines.timeout_s": 7.0, "engines.kv_cache_gib": 3.0, "training.num_ranks": 2}
    record = run.records()[3].model_copy(update={"changed": {**then, "engines.deterministic": True}})
    now = run.context("engines.timeout_s=9", "engines.kv_cache_gib=2")
    made_with = spec_at(now, record)
    engines = now.spec.engines.model_copy(update={"kv_cache_gib": 3.0, "deterministic": True})
    assert made_with.engines == engines
    assert (made_with.training.num_ranks, now.spec.training.num_ranks) == (2, 1)


def test_what_comes_out_differently_makes_the_run_fall_back_and_say_so(
    dense: ToyRun, whole: ToyRun, tmp_path: Path
) -> None:
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    before = run.record_bytes()
    flip_a_bit(run.place(run.records()[3].checkpoint))
    run.engines.salts["update_policy"] = "another kind of CPU"
    records = run.train()
    assert "checkpoint of iteration 3 could not be made again to the same digest" in run.said
    assert "falling back to iteration 2, the last undamaged one" in run.said
    assert [record.iteration for record in records] == [0, 1, 2, 3, 4]
    after = run.record_bytes()
    assert [after[name] == before[name] for name in before] == [True, True, True, False]
    assert [p.read_bytes() for p in run.folder.glob("leases/*/superseded/000003.json")] == [before["000003.json"]]
    assert digests(records)[:3] == digests(whole.records())[:3]
    assert records[3].checkpoint.digest != whole.records()[3].checkpoint.digest


def test_without_a_reference_the_run_begins_anew_and_tries_it_once(dense: ToyRun, tmp_path: Path) -> None:
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    lose_it(run.place(run.records()[0].reference))
    run.engines.salts["start_policy"] = "another kind of CPU"
    records = run.train()
    assert "no iteration is undamaged: the run starts over" in run.said
    assert run.said.count("could not be made again") == 1
    assert [record.iteration for record in records] == [0, 1, 2, 3, 4]
    assert {record.reference.digest for record in records} == {records[0].checkpoint.digest}
    assert len(list(run.folder.glob("leases/*/superseded/*.json"))) == 4


@pytest.mark.parametrize("damage", [flip_a_bit, lose_it])
def test_a_checkpoint_damaged_while_an_iteration_works_is_made_again(
    damage: Callable[[Path], None], whole: ToyRun, tmp_path: Path
) -> None:
    run = ToyRun(tmp_path, whole.overrides, engines=ToyEngines(best_is_the_second))
    run.engines.before("score_rollouts", 3, lambda: damage(run.place(run.records()[2].checkpoint)))
    assert digests(run.train()) == digests(whole.records())
    assert "checkpoint of iteration 2 is undamaged again" in run.said
    assert run.engines.count("generate_rollouts") == 4


def test_rollouts_damaged_before_they_are_scored_are_sampled_again(whole: ToyRun, tmp_path: Path) -> None:
    def damages_and_dies() -> None:
        flip_a_bit(max((run.home / "store" / "rollouts").iterdir(), key=lambda path: path.stat().st_mtime_ns))
        raise EngineDied("killed")

    run = ToyRun(tmp_path, whole.overrides, engines=ToyEngines(best_is_the_second))
    run.engines.before("score_rollouts", 3, damages_and_dies)
    assert digests(run.train()) == digests(whole.records())
    assert run.engines.count("generate_rollouts") == 5


def test_a_dataset_damaged_while_an_iteration_works_is_made_again(whole: ToyRun, tmp_path: Path) -> None:
    run = ToyRun(tmp_path, whole.overrides, engines=ToyEngines(best_is_the_second))
    run.engines.before("update_policy", 2, lambda: flip_a_bit(run.place(run.records()[0].dataset)))
    assert digests(run.train()) == digests(whole.records())
    assert run.engines.count("prepare_dataset") == 2


def test_a_disk_that_damages_everything_at_once_ends_the_run(tmp_path: Path, whole: ToyRun) -> None:
    run = ToyRun(tmp_path, whole.overrides, engines=ToyEngines(best_is_the_second))

    def damages_again() -> None:
        flip_a_bit(run.place(run.records()[-1].checkpoint))
        run.engines.before("compute_advantages", 1, damages_again)
        raise ArtifactCorrupted("expected sha256 aa, found sha256 bb")

    run.engines.before("compute_advantages", 2, damages_again)
    with pytest.raises(ArtifactCorrupted, match="expected sha256"):
        run.train()
    assert [record.iteration for record in run.records()] == [0, 1]
    run.engines.planned.clear()
    assert digests(run.train()) == digests(whole.records())


def test_what_nobody_needs_any_more_may_be_damaged(dense: ToyRun, whole: ToyRun, tmp_path: Path) -> None:
    run = dense.copy(tmp_path / "copy", best_is_the_second)
    last = run.records()[3]
    for ref in (last.made("rollouts"), last.made("scores"), last.made("experience")):
        assert ref is not None
        (run.place(ref) / "manifest.json").unlink()
    assert digests(run.train()) == digests(whole.records())
