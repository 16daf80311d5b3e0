"""Rewards as stages see them: a model counts by its files, and a trial knows what only a run can score."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.engines.protocol import EngineInput
from ppo_core.engines import user_code
from ppo_core.records import FILES_OF, NOT_IN_A_TRIAL, InputError, ScoreJob
from tasks.checks.try_reward import doubts, require_scores
from tasks.stages.stage import StageSpec, job_of, key_of
from tasks.stages.table import SCORE_ROLLOUTS
from tests.tasks.run_contexts import run_context, smoke_spec
from tests.tasks.toy_engines import ToyEngines


def test_rewards_have_another_digest_with_other_files_of_a_reward_model(tmp_path: Path) -> None:
    (tmp_path / "rm").mkdir()
    source = {"kind": "model", "path": str(tmp_path / "rm")}

    def rewards(number: int, *more: dict[str, str]) -> EngineInput:
        spec = smoke_spec().with_overrides([f"reward.sources={list(more)}"])
        return run_context(spec, tmp_path / f"home-{number}", engines=ToyEngines()).rewards()["sources"]

    (tmp_path / "rm" / "config.json").write_text("{}")
    first, again, without = rewards(0, source), rewards(1, source), rewards(2)
    (tmp_path / "rm" / "config.json").write_text('{"num_labels": 1}')
    other = rewards(3, source)
    assert first == again
    assert len({first.digest, without.digest, other.digest}) == 3
    assert first.path == without.path


def test_the_scoring_engine_is_told_the_digest_of_each_folder_and_keys_are_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text("{}")
    folder = str(tmp_path / "rm")
    spec = smoke_spec().with_overrides([f"reward.sources={[{'kind': 'model', 'path': folder}]}"])
    context = run_context(spec, tmp_path / "home", engines=ToyEngines())
    job, paths = ScoreJob(reward=spec.reward, answer_column="answer", split="train"), context.rewards()
    told = job_of(context, StageSpec(SCORE_ROLLOUTS, job, paths=paths), "k").folders
    assert told == paths
    assert paths[f"{FILES_OF}{folder}"] == context.folder_input(folder)
    assert FILES_OF == user_code.FILES_OF
    before = {name: given for name, given in paths.items() if name in ("sources", "functions")}
    assert key_of(context, StageSpec(SCORE_ROLLOUTS, job, paths=paths)) == key_of(
        context, StageSpec(SCORE_ROLLOUTS, job, paths=before)
    )


def test_a_reward_that_only_a_run_can_score_raises_no_doubt() -> None:
    assert doubts([None, None], [f"by_token: it reads completion_ids, and {NOT_IN_A_TRIAL}"] * 2) == []
    assert doubts([None, None], ["by_token: None"] * 2) != []
    require_scores([None, None], [f"by_token: it reads completion_ids, and {NOT_IN_A_TRIAL}"] * 2)


def test_a_reward_that_can_score_none_of_the_rows_is_refused() -> None:
    prose = "not scored by judge: it answered 'Sure!', which has no score"
    with pytest.raises(InputError, match=r"none of 3 rows has a score \(not scored by judge: it answered"):
        require_scores([None] * 3, [prose] * 3)
    require_scores([None, 1.0], [prose, None])
    require_scores([None, None], ["not scored by mine"] * 2)  # its own None: perhaps of these rows alone
    assert doubts([None, None], ["not scored by mine"] * 2) == [
        "no row has a score (not scored by mine): training would end at its first iteration"
    ]
