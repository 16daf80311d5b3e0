"""Several rollout engines give what one gives, and a death costs only the shards that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef
from infra.engines.protocol import EngineDied, EngineProgress
from tasks.stages.jobs import StageResult
from tasks.stages.sharded_sampling import Together, after, cut
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_runs import ToyRun, digests

SHORT = ("iterations=2", "evaluation.every=2")


def trained(home: Path, *overrides: str, engines: int = 1) -> ToyRun:
    run = ToyRun(home, (*SHORT, *overrides), engines=ToyEngines(rollout_engines=engines))
    run.train()
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> ToyRun:
    """A run with one rollout engine."""
    return trained(tmp_path_factory.mktemp("alone") / "home")


@pytest.mark.parametrize("engines", [2, 3])
def test_no_digest_depends_on_the_number_of_engines(alone: ToyRun, tmp_path: Path, engines: int) -> None:
    run = trained(tmp_path / "home", engines=engines)
    assert digests(run.records()) == digests(alone.records())
    for ours, theirs in zip(run.records(), alone.records(), strict=True):
        assert ours.checkpoint.key == theirs.checkpoint.key
        if ours.made("rollouts") is not None and theirs.made("rollouts") is not None:
            assert ours.made("rollouts").key == theirs.made("rollouts").key
            assert ours.made("rollouts").metrics == theirs.made("rollouts").metrics
    for name in run.engines.rollout_names:
        assert run.engines.count(f"generate_shard by {name}") == 2 + 2 * 2  # iterations, and evaluations twice each
    assert run.engines.count("generate_rollouts") == 0


def test_there_are_no_more_shards_than_prompts(tmp_path: Path, prefect_server: None) -> None:
    few = ("rollout.prompts_per_iteration=2", "training.microbatch_size=1", "evaluation.num_prompts=1")
    run = trained(tmp_path / "home", *few, engines=3)
    assert [run.engines.count(f"generate_shard by {name}") for name in run.engines.rollout_names] == [2, 2, 0]
    assert run.engines.count("answer_held_out") == 4  # of one prompt each: by one engine, in one piece
    one = trained(tmp_path / "one", *few)
    assert digests(run.records()) == digests(one.records())


def test_after_a_death_only_the_missing_shard_is_sampled_again(alone: ToyRun, tmp_path: Path) -> None:
    run = ToyRun(tmp_path / "home", SHORT, engines=ToyEngines(rollout_engines=3))

    def dies() -> None:
        raise EngineDied("engine 'rollout-2', job 'generate_shard': the process was killed by SIGKILL")

    run.engines.before("generate_shard by rollout-2", 3, dies)  # after the first evaluation: in iteration 1
    run.train()
    assert digests(run.records()) == digests(alone.records())
    assert [run.engines.asked[f"generate_shard by {name}"] for name in run.engines.rollout_names] == [6, 7, 6]


@pytest.mark.parametrize(
    ("number", "parts", "sizes"), [(7, 3, [2, 2, 3]), (2, 5, [1, 1]), (6, 1, [6]), (6, 3, [2] * 3)]
)
def test_prompts_are_cut_into_contiguous_parts_of_about_one_size(number: int, parts: int, sizes: list[int]) -> None:
    ranges = cut(number, parts)
    assert [len(part) for part in ranges] == sizes
    assert [index for part in ranges for index in part] == list(range(number))


def test_the_progress_of_several_is_that_of_one() -> None:
    seen: list[EngineProgress] = []
    together = Together(seen.append, 10, 2)
    first, second = together.part(0), together.part(1)
    first(EngineProgress("rollout", "generate_shard", 2, 5, "responses"))
    second(EngineProgress("rollout-2", "generate_shard", 4, 5, "responses"))
    first(EngineProgress("rollout", "generate_shard", 5, 5, "responses"))
    assert [(one.job, one.done, one.total, one.note) for one in seen] == [
        ("generate_rollouts", done, 10, "responses of 2 engines") for done in (2, 6, 9)
    ]


def test_the_seconds_are_those_of_the_longest_way() -> None:
    ref = ArtifactRef(kind="rollouts", uri="file:///a/rollouts/k", digest="d")
    shard, merged = StageResult(ref, {}, 5.0, 1.0, 0.5), StageResult(ref, {}, 0.25, 0.25, 0.25)
    found = after(merged, shard, 0.5)
    assert (found.engine_s, found.store_s, found.hops_s) == (5.25, 1.75, 0.75)
    assert after(merged, None, 0.5).store_s == 0.75
