"""What reaches the reward functions, what is made of scores that are missing, and what the flow hears meanwhile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from infra.engines.process import EngineJobError
from ppo_core.data.tables import write_rollouts
from ppo_core.engines.scoring import prepare_dataset, score_metrics
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import WITH_SIGNAL, RolloutRow, ScoreRow
from ppo_core.spec import RewardSpec
from ppo_core.spec.reward.section import OF_THE_WHOLE_SCORE
from tests.ppo_core.engines.engine_jobs import Client
from tests.ppo_core.scoring.scoring_jobs import prepare, score, write_lines

pytest_plugins = ["tests.ppo_core.engines.engine_fixtures"]


def test_an_iteration_without_a_single_score_is_refused_and_may_be_tried_again(
    scoring: Client, sources: Path, model: Path
) -> None:
    dataset = prepare(scoring, sources, model)
    with pytest.raises(
        EngineJobError, match=r"none of the 3 responses has a score \(not scored by nobody\)"
    ) as refused:
        score(scoring, sources, dataset, {"function": "my_rewards.py:nobody"}, ["a", "b", "c"])
    assert refused.value.retryable
    assert not list((scoring.folder / f"job-{next(scoring.numbers) - 1}").iterdir())


def test_more_responses_without_a_score_than_the_spec_allows_end_the_stage(
    scoring: Client, sources: Path, model: Path
) -> None:
    dataset, reward = prepare(scoring, sources, model), {"function": "my_rewards.py:some"}
    allowed = {**reward, "max_failed_fraction": 0.34}
    assert [row["score"] for row in score(scoring, sources, dataset, allowed, ["a", "b", "c"])] == [None, 1.0, 1.0]
    with pytest.raises(
        EngineJobError,
        match=r"1 of 3 responses have no score \(the first: not scored by some\), more than "
        r"reward.max_failed_fraction=0.3 allows",
    ) as refused:
        score(scoring, sources, dataset, {**reward, "max_failed_fraction": 0.3}, ["a", "b", "c"])
    assert refused.value.retryable


def test_the_mean_of_nothing_is_no_metric() -> None:
    unscored = ScoreRow("a", 0, None, {"judge": None, "length": 2.0}, False, "not scored by judge")
    scored = ScoreRow("b", 0, 3.0, {"judge": 1.0, "length": 2.0}, False, None)
    assert score_metrics([unscored], "score") == {"score/unscored": 1.0, "score/length": 2.0}
    assert score_metrics([unscored, scored], "score") == {
        "score/unscored": 1.0, "score/mean": 3.0, "score/std": 0.0, "score/judge": 1.0, "score/length": 2.0,
    }  # fmt: skip


def test_no_reward_may_have_the_name_of_a_metric_of_the_whole_score() -> None:
    row = ScoreRow("a", 0, 3.0, {}, False, None, {0: 3.0})
    measured = {*score_metrics([row], "score"), WITH_SIGNAL}
    documented = re.findall(r"`(score/\w+)`", (Path(__file__).parents[3] / "docs" / "metrics.md").read_text())
    assert {*measured, *documented} == {f"score/{name}" for name in OF_THE_WHOLE_SCORE}
    for name in OF_THE_WHOLE_SCORE:
        written = {"function": f"rewards.py:{name}"}
        with pytest.raises(ValidationError, match=f"rewards.py:{name} is called {name}, but score/{name} is a metric"):
            RewardSpec.model_validate(written, context="written")
        assert RewardSpec.model_validate(written).rewards[0].component == name, "the record of an earlier run"


def test_an_evaluation_without_scores_fails_unless_it_may(scoring: Client, sources: Path, model: Path) -> None:
    dataset = prepare(scoring, sources, model, dataset={"evaluation": "train.jsonl"})
    rows = pq.read_table(dataset / "eval.parquet").to_pylist()
    folder = scoring.output()
    write_rollouts(folder / "rollouts.parquet", [RolloutRow(rows[0]["prompt_id"], 0, [5], [6], "w2", [-1.0], "stop")])
    two = scoring.output()
    answers = [RolloutRow(rows[0]["prompt_id"], n, [5], [6], "w2", [-1.0], "stop") for n in range(2)]
    write_rollouts(two / "rollouts.parquet", answers)
    inputs = {"sources": sources, "sampled": folder, "greedy": folder, "dataset": dataset}

    def measured(function: str, **allowed: float) -> dict[str, float]:
        reward = {"function": f"my_rewards.py:{function}", **allowed}
        spec = {"checkpoint": "c", "reward": reward, "answer_column": "answer", "pass_score": 1.0}
        metrics: dict[str, float] = scoring.run("score_evaluation", inputs, spec, scoring.output()).result["metrics"]
        return metrics

    lengths = {"evaluation/response_length": 1.0, "evaluation/greedy_response_length": 1.0}
    with pytest.raises(
        EngineJobError,
        match=r"1 of 1 sampled held-out responses have no score \(the first: not scored by nobody\), more than "
        r"reward.max_failed_fraction=0.5 allows: see why, or raise it",
    ) as refused:
        measured("nobody")
    assert refused.value.retryable
    assert not list((scoring.folder / f"job-{next(scoring.numbers) - 1}").iterdir())
    assert measured("nobody", max_failed_fraction=1.0) == lengths
    scores = {"evaluation/score": 1.0, "evaluation/accuracy": 1.0}
    greedy = {"evaluation/greedy_score": 1.0, "evaluation/greedy_accuracy": 1.0}
    assert measured("length") == {**lengths, **scores, **greedy}
    inputs["sampled"] = two
    with pytest.raises(EngineJobError, match="1 of 1 greedy held-out responses have no score"):
        measured("some")
    inputs["greedy"] = two
    unscored = {"evaluation/unscored": 1.0, "evaluation/greedy_unscored": 1.0}
    assert measured("some") == {**lengths, **scores, **greedy, **unscored}
    with pytest.raises(EngineJobError, match=r"1 of 2 sampled held-out responses .*max_failed_fraction=0.4 allows"):
        measured("some", max_failed_fraction=0.4)


@pytest.mark.parametrize("answers", [[7, 1.5, "1.5"], [[1, "a"], {"b": [None]}, False]])
def test_an_answer_comes_to_the_reward_as_it_is_in_the_row(
    scoring: Client, sources: Path, model: Path, tmp_path: Path, answers: list[Any]
) -> None:
    write_lines(tmp_path / "typed.jsonl", [{"prompt": "w1 w2", "answer": answer} for answer in answers])
    dataset = prepare(scoring, sources, model, dataset={"train": str(tmp_path / "typed.jsonl")})
    right = [json.dumps(answer) for answer in answers]
    scores = score(scoring, sources, dataset, {"function": "my_rewards.py:exact"}, right)
    assert [row["score"] for row in scores] == [1.0] * 3


def test_long_tables_give_signs_of_life(sources: Path, model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "long.jsonl", [{"prompt": "w1", "completion": "w2"}] * 2001)
    long, seen = str(tmp_path / "long.jsonl"), []
    spec = {
        "dataset": {"train": long},
        "model": {"path": str(model)},
        "sft_data": long,
        "max_response_tokens": 8,
        "num_eval_prompts": 0,
        "reward": {"function": "my_rewards.py:length"},
    }
    inputs = {
        name: JobInput(path, "") for name, path in {"sources": sources, "tokenizer": model, "model": model}.items()
    }
    prepare_dataset(Job("prepare_dataset", inputs, tmp_path, spec, lambda *report: seen.append(report)))
    read, tokenized = seen[:2], seen[2:]
    assert [note.partition(" of ")[0] for *_, note in read] == ["1,000 rows", "2,000 rows"]
    assert [(done, total) for done, total, _ in tokenized] == [(1000, 2001), (2000, 2001)] * 2


def test_an_evaluation_tells_each_of_several_rewards(scoring: Client, sources: Path, model: Path) -> None:
    dataset = prepare(scoring, sources, model, dataset={"evaluation": "train.jsonl"})
    rows, folder = pq.read_table(dataset / "eval.parquet").to_pylist(), scoring.output()
    write_rollouts(folder / "rollouts.parquet", [RolloutRow(rows[0]["prompt_id"], 0, [5], [6], "a b", [-1.0], "stop")])
    inputs = {"sources": sources, "sampled": folder, "greedy": folder, "dataset": dataset}
    gold = {"function": "my_rewards.py:length", "weight": 0, "name": "gold"}
    reward = {"sources": [{"function": "my_rewards.py:later"}, gold]}
    spec = {"checkpoint": "c", "reward": reward, "answer_column": "answer", "pass_score": 1.0}
    metrics = scoring.run("score_evaluation", inputs, spec, scoring.output()).result["metrics"]
    for prefix in ("evaluation/", "evaluation/greedy_"):
        assert metrics[f"{prefix}score"] == metrics[f"{prefix}score/later"] == 0.5
        assert metrics[f"{prefix}score/gold"] == 2.0


def test_a_reward_of_weight_0_that_scores_too_few_ends_the_stage_as_any_other(
    scoring: Client, sources: Path, model: Path
) -> None:
    """What `guards.gold_reward` looks at is usually one: without its scores that guard would be off."""
    dataset = prepare(scoring, sources, model)

    def scored(gold: str, fraction: float) -> list[Any]:
        measured = {"function": f"my_rewards.py:{gold}", "weight": 0, "name": "gold"}
        reward = {"sources": [{"function": "my_rewards.py:length"}, measured], "max_failed_fraction": fraction}
        return [row["score"] for row in score(scoring, sources, dataset, reward, ["a", "b", "c"])]

    for gold, count, fraction in (("nobody", 3, 0.5), ("some", 1, 0.3)):
        with pytest.raises(
            EngineJobError,
            match=rf"{count} of 3 responses have no score of gold \(the first: not scored by gold\), more than "
            rf"reward.max_failed_fraction={fraction} allows: see why, or raise it",
        ) as refused:
            scored(gold, fraction)
        assert refused.value.retryable
    assert scored("some", 0.34) == [1.0, 1.0, 1.0]
