"""Which prompts are learned from: against lists made by hand, through files as the scoring engine has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.tables import read_rollouts, read_scores, write_rollouts, write_scores
from ppo_core.engines.scoring import score_metrics, score_rollouts
from ppo_core.engines.selection import choose, has_signal, select_rollouts, signals
from ppo_core.processes.protocol import Job, JobInput
from ppo_core.records import WITH_SIGNAL, PromptRow, RolloutRow, ScoreRow
from ppo_core.scoring.weighted import check_enough
from ppo_core.spec import RewardSpec
from tests.ppo_core.written_tables import write_prompts

NUMBER: dict[str, Any] = {"sources": [{"kind": "number"}]}
BATCHES = [
    {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [1.0, None]},
    {"d": [0.5, 0.25], "b": [0.0, 1.0], "e": [1.0, 0.0]},
]


def job(folder: Path, inputs: dict[str, Path], **spec: Any) -> Job:
    """Into a new folder; a folder's path serves as its digest."""
    folder.mkdir()
    return Job("", {name: JobInput(path, str(path)) for name, path in inputs.items()}, folder, spec, lambda *_: None)


def write_batch(folder: Path, scores: dict[str, list[float | None]]) -> Path:
    """Responses and scores of a batch, in one folder."""
    folder.mkdir()
    samples = [(name, number, score) for name, group in scores.items() for number, score in enumerate(group)]
    write_rollouts(
        folder / "rollouts.parquet",
        [RolloutRow(name, number, [5], [7, 2], f"{name}{number}", [-1.0, -1.0], "stop") for name, number, _ in samples],
    )
    write_scores(
        folder / "scores.parquet",
        [
            ScoreRow(name, number, score, {"number": score}, False, None, None if score is None else {0: score})
            for name, number, score in samples
        ],
    )
    return folder


def select(
    tmp_path: Path, num_prompts: int, batches: Sequence[dict[str, list[float | None]]] = BATCHES
) -> tuple[Path, dict[str, Any]]:
    """Of all batches."""
    inputs = {"sources": tmp_path}
    for number, scores in enumerate(batches):
        batch = write_batch(tmp_path / f"batch-{number}", scores)
        inputs |= {f"rollouts_{number}": batch, f"scores_{number}": batch}
    spec = {"reward": NUMBER, "answer_column": "answer", "num_batches": len(batches), "samples_per_prompt": 2}
    asked = job(tmp_path / "chosen", inputs, num_prompts=num_prompts, **spec)
    return asked.output, select_rollouts(asked)


def test_a_prompt_has_a_signal_where_two_scores_differ() -> None:
    assert [has_signal(scores) for scores in ([0, 0, 0], [1, 0, 1], [None, 1], [None, 1, 0], [])] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert not has_signal([0.1 + 0.2, 0.3])  # which are one number in float32: their advantages would be 0
    rows = [ScoreRow("p", 0, score, {}, False, None) for score in (1.0, 1.0, 0.0, 1.0)]
    ended, cut = sampled("stop"), sampled("length")
    assert signals([ended] * 4, rows, 2, truncated_count=False) == [False, True]
    assert signals([ended] * 4, rows, 4, truncated_count=False) == [True]
    # Of the second prompt, one response is left that is learned from.
    assert signals([ended, ended, cut, ended], rows, 2, truncated_count=True) == [False, True]
    assert signals([ended, ended, cut, ended], rows, 2, truncated_count=False) == [False, False]


def test_scores_that_the_clip_makes_one_are_no_signal(tmp_path: Path) -> None:
    """6 and 9 are 5 to whoever learns, as -7 and -6 are -5; 4 and 9 are 4 and 5."""
    groups = {"high": [6.0, 9.0], "low": [-7.0, -6.0], "both": [-7.0, 6.0], "differ": [4.0, 9.0]}
    rows = [ScoreRow("p", 0, score, {}, False, None) for group in groups.values() for score in group]
    ended = [sampled("stop")] * len(rows)
    assert signals(ended, rows, 2, truncated_count=True, score_clip=5.0) == [False, False, True, True]
    assert signals(ended, rows, 2, truncated_count=True) == [True] * 4
    batch = write_batch(tmp_path / "batch", {name: list(group) for name, group in groups.items()})
    inputs = {"sources": tmp_path, "rollouts_0": batch, "scores_0": batch}
    common: dict[str, Any] = {"reward": NUMBER, "answer_column": "answer", "samples_per_prompt": 2, "score_clip": 5.0}
    chosen = job(tmp_path / "chosen", inputs, num_batches=1, num_prompts=2, **common)
    metrics = select_rollouts(chosen)["metrics"]
    assert metrics["rollout/prompts_without_signal"] == 0.0
    assert [row.prompt_id for row in read_rollouts(chosen.output / "rollouts.parquet")][::2] == ["both", "differ"]
    given = {"sources": tmp_path, "rollouts": chosen.output, "dataset": tmp_path}
    asked = job(tmp_path / "scored", given, split="train", **{**common, "score_clip": 3.0})
    assert score_rollouts(asked)["metrics"][WITH_SIGNAL] == 1.0, "4 and 9 are 3"


def sampled(finish_reason: str) -> RolloutRow:
    """A response that ended so."""
    return RolloutRow("p", 0, [5], [7], "", [-1.0], finish_reason)


@pytest.mark.parametrize(("count", "chosen"), [(1, [1]), (3, [1, 2, 4]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 3, 4])])
def test_those_with_a_signal_come_first_and_the_order_stays(count: int, chosen: list[int]) -> None:
    assert choose([False, True, True, False, True], count) == chosen


def test_what_is_chosen_is_that_of_all_batches_and_counted(tmp_path: Path) -> None:
    """b comes twice, and its second two responses count on; e is left over."""
    folder, facts = select(tmp_path, 3)
    rows = read_rollouts(folder / "rollouts.parquet")
    assert [row.response for row in rows] == ["b0", "b1", "d0", "d1", "b0", "b1"]
    assert [(row.prompt_id, row.sample_index) for row in rows] == [
        ("b", 0),
        ("b", 1),
        ("d", 0),
        ("d", 1),
        ("b", 2),
        ("b", 3),
    ]
    scores = read_scores(folder / "scores.parquet")
    assert [(row.prompt_id, row.sample_index, row.score, row.token_scores) for row in scores] == [
        (row.prompt_id, row.sample_index, score, {0: score})
        for row, score in zip(rows, [1.0, 0.0, 0.5, 0.25, 0.0, 1.0], strict=True)
    ]
    assert (facts["num_responses"], facts["num_response_tokens"]) == (6, 12)
    assert facts["metrics"] == {
        "rollout/response_length": 2.0,
        "rollout/finished": 1.0,
        "rollout/batches": 2.0,
        "rollout/dropped_prompts": 3.0,
        "rollout/prompts_without_signal": 0.0,
        "rollout/score": pytest.approx((1 + 1 + 0.5 + 0.25 + 1 + 1) / 11),
    }


def test_where_nothing_is_scored_the_first_are_chosen_and_no_score_is_measured(tmp_path: Path) -> None:
    folder, facts = select(tmp_path, 1, [{"a": [None, None], "b": [None, None]}])
    assert [row.prompt_id for row in read_rollouts(folder / "rollouts.parquet")] == ["a", "a"]
    assert "rollout/score" not in facts["metrics"]


def test_where_there_are_too_few_the_first_others_fill_up(tmp_path: Path) -> None:
    folder, facts = select(tmp_path, 5)
    assert [row.prompt_id for row in read_rollouts(folder / "rollouts.parquet")][::2] == ["a", "b", "d", "b", "e"]
    assert facts["metrics"]["rollout/prompts_without_signal"] == 1.0
    assert facts["metrics"]["rollout/dropped_prompts"] == 1.0


@pytest.mark.parametrize("measured", [0, 1])
def test_what_a_reward_measures_in_one_batch_alone_is_kept_whichever_it_is(tmp_path: Path, measured: int) -> None:
    """A measure is optional: verl's and OpenRLHF's functions, and servers, give it for some samples alone."""
    inputs = {"sources": tmp_path}
    for number, name in enumerate("ab"):
        batch = write_batch(tmp_path / name, {name: [0.0, 1.0]})
        rows = read_scores(batch / "scores.parquet")
        if number == measured:
            rows = [replace(row, components={**row.components, "number/far": 2.0}) for row in rows]
        write_scores(batch / "scores.parquet", rows)
        inputs |= {f"rollouts_{number}": batch, f"scores_{number}": batch}
    spec = {"reward": NUMBER, "answer_column": "answer", "num_batches": 2, "samples_per_prompt": 2, "num_prompts": 2}
    asked = job(tmp_path / "chosen", inputs, **spec)
    select_rollouts(asked)
    scores = read_scores(asked.output / "scores.parquet")
    far = {number: 2.0 if number == measured else None for number in (0, 1)}
    assert [row.components for row in scores] == [
        {"number": score, "number/far": far[number]} for number in (0, 1) for score in (0.0, 1.0)
    ]
    assert score_metrics(scores, "score")["score/number/far"] == 2.0


def test_a_share_of_failed_scores_that_each_batch_may_have_may_be_larger_among_the_chosen(tmp_path: Path) -> None:
    """Two of twelve have no score, and a fifth may; b and c alone are chosen, where they are two of six."""
    reward = {**NUMBER, "max_failed_fraction": 0.2}
    batch = write_batch(
        tmp_path / "batch", {"a": [0.0] * 3, "b": [1.0, 0.0, None], "c": [None, 0.0, 1.0], "d": [1.0] * 3}
    )
    check_enough(read_scores(batch / "scores.parquet"), RewardSpec.model_validate(reward))
    common = {"reward": reward, "answer_column": "answer", "samples_per_prompt": 3}
    inputs = {"sources": tmp_path, "rollouts_0": batch, "scores_0": batch}
    chosen = job(tmp_path / "chosen", inputs, num_batches=1, num_prompts=2, **common)
    select_rollouts(chosen)
    given = {"sources": tmp_path, "rollouts": chosen.output, "dataset": tmp_path}
    asked = job(tmp_path / "scored", given, split="train", **common)
    metrics = score_rollouts(asked)["metrics"]
    assert (metrics["score/unscored"], metrics[WITH_SIGNAL]) == (2.0, 2.0)
    assert [row.score for row in read_scores(asked.output / "scores.parquet")] == [1.0, 0.0, None, None, 0.0, 1.0]


def test_responses_that_come_with_scores_are_scored_again_by_another_reward_only(tmp_path: Path) -> None:
    """No response is a number, so each would get 0: the scores that came with them are told apart from these."""
    chosen, _ = select(tmp_path, 3)
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    write_prompts(dataset / "train.parquet", [PromptRow(name, name, [5], "7", {}) for name in "bde"])

    def scored(name: str, **changes: Any) -> tuple[list[float | None], dict[str, float]]:
        inputs = {"rollouts": chosen, "dataset": dataset, "sources": tmp_path}
        spec = {"reward": NUMBER, "answer_column": "answer", "split": "train", **changes}
        asked = job(tmp_path / name, inputs, **spec)
        metrics = score_rollouts(asked)["metrics"]
        return [row.score for row in read_scores(asked.output / "scores.parquet")], metrics

    scores, metrics = scored("same", samples_per_prompt=2)
    assert (scores, metrics[WITH_SIGNAL]) == ([1.0, 0.0, 0.5, 0.25, 0.0, 1.0], 3.0)
    scores, metrics = scored("other", reward={"sources": [{"kind": "number", "tolerance": 0.5}]})
    assert scores == [0.0] * 6
    assert WITH_SIGNAL not in metrics
