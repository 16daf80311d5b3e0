"""Sampling until prompts have a signal: the cursor, deaths, reruns, and that the number of engines is free."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flows.iteration import Rerun
from infra.artifacts.local_store import LocalStore
from infra.engines.protocol import EngineJob
from tasks.policies.lineage import step_of
from tests.tasks.toy_engines import JOBS, ToyEngines
from tests.tasks.toy_files import has_signal
from tests.tasks.toy_runs import ToyRun, digests, killed

pytestmark = pytest.mark.usefixtures("prefect_server")
P, BATCHES = 32, 3
DYNAMIC = (
    "iterations=3",
    "evaluation.every=3",
    "algorithm.kind=rloo",
    "rollout.samples_per_prompt=2",
    f"rollout.dynamic_sampling.max_batches={BATCHES}",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """A run that nothing has disturbed."""
    run = ToyRun(tmp_path_factory.mktemp("whole") / "home", DYNAMIC)
    run.train()
    return run


def chosen(run: ToyRun, iteration: int) -> list[str]:
    """What stands for the responses to each prompt, of an iteration's rollouts."""
    ref = run.records()[iteration].made("rollouts")
    assert ref is not None
    return (run.place(ref) / "rollouts.json").read_text().splitlines()


def test_prompts_without_a_signal_make_room_for_the_next_ones_of_the_order(whole: ToyRun) -> None:
    """About half of the toy engine's prompts have one: two or three batches, whose prompts the cursor counts."""
    position = 0
    for record in whole.records()[1:]:
        lines = chosen(whole, record.iteration)
        batches = record.metrics["rollout/batches"]
        position += int(batches) * P
        assert (len(lines), record.position) == (P, position)
        assert batches in (2, 3)
        assert batches == BATCHES or all(map(has_signal, lines))
    assert whole.engines.count("select_rollouts") == 3
    assert whole.engines.count("generate_rollouts") == position / P
    assert whole.engines.count("score_rollouts") == position / P + 3  # each batch, and the stage of each iteration


def test_no_digest_depends_on_the_number_of_engines(whole: ToyRun, tmp_path: Path) -> None:
    run = ToyRun(tmp_path / "home", DYNAMIC, engines=ToyEngines(rollout_engines=2))
    assert digests(run.train()) == digests(whole.records())


@pytest.mark.parametrize(
    ("job", "number"), [("generate_rollouts", 2), ("score_rollouts", 1), ("score_rollouts", 2), ("select_rollouts", 2)]
)
def test_a_death_changes_no_byte_and_costs_no_batch_that_was_done(
    whole: ToyRun, tmp_path: Path, job: str, number: int
) -> None:
    run = ToyRun(tmp_path / "home", DYNAMIC)
    run.engines.before(job, number, killed)
    run.train_until_killed()
    assert digests(run.train()) == digests(whole.records())
    assert run.engines.count("generate_rollouts") == whole.engines.count("generate_rollouts")


@pytest.mark.parametrize(("norm", "limit"), [("none", 2.5), ("std", None)])
def test_prompts_are_judged_by_what_the_clip_leaves_of_scores(tmp_path: Path, norm: str, limit: float | None) -> None:
    clip = ("iterations=1", "advantages.score_clip=2.5", f"advantages.score_norm={norm}")
    run, limits = ToyRun(tmp_path / "home", (*DYNAMIC, *clip)), dict[str, list[float | None]]()

    def noted(name: str) -> Callable[[ToyEngines, EngineJob], dict[str, Any]]:
        def do(engines: ToyEngines, job: EngineJob) -> dict[str, Any]:
            if job.spec["samples_per_prompt"] is not None:
                limits.setdefault(name, []).append(job.spec["score_clip"])
            return JOBS[name](engines, job)

        return do

    run.engines.jobs |= {name: noted(name) for name in ("score_rollouts", "select_rollouts")}
    run.train()
    assert {name: set(found) for name, found in limits.items()} == {
        "score_rollouts": {limit},
        "select_rollouts": {limit},
    }


def test_the_lineage_is_that_of_the_records(whole: ToyRun) -> None:
    records, store = whole.records(), LocalStore(whole.home / "store")
    for before, record in pairwise(records):
        assert step_of(store, record, before).complaints == []


def test_responses_can_be_scored_again(whole: ToyRun, tmp_path: Path) -> None:
    run = whole.copy(tmp_path / "copy")
    before = digests(run.records())
    run.train(rerun=Rerun(iteration=2, start="score"))
    assert digests(run.records()) == before
