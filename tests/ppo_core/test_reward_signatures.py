"""Reward functions written for other trainers, in the forms that those call them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.plugins import Sources
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

CODE = """
import asyncio
import numpy as np
import torch

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "gsm8k" and extra_info["index"] >= 0
    return float(solution_str == ground_truth) + bonus

def with_parts(data_source, solution_str, ground_truth, extra_info):
    return {"score": compute_score(data_source, solution_str, ground_truth, extra_info), "acc": True}

def in_a_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [with_parts(*row) for row in zip(data_sources, solution_strs, ground_truths, extra_infos)]

def reward_func(queries, prompts, labels, **kwargs):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    return torch.tensor([float(query[len(prompt):] == label) for query, prompt, label in zip(queries, prompts, labels)])

def in_a_mapping(queries, prompts, labels):
    scores = reward_func(queries, prompts, labels)
    return {"rewards": scores, "scores": scores, "extra_logs": {}}

async def verified(prompt, completion, answer, info, state, **columns):
    await asyncio.sleep(0.01 * (completion != answer))
    return float(completion == answer and columns["level"] > 0)

def of_a_chat(completion, answer):
    return float(completion[-1]["content"] == answer)

def parsed(completion, answer, parser):
    return float(parser(completion) == answer)

def with_own_parser(completion, answer, parser=str.strip):
    return float(parser(completion) == answer)

def trl(completions, ground_truth, **columns):
    return np.array([text == right for text, right in zip(completions, ground_truth)], dtype=float)

def needs(solution_str, ground_truth, difficulty):
    return difficulty

def broken(queries, prompts, labels):
    return {"reward": [1.0, 0.0]}
"""
ROWS = [
    PromptRow(str(n), f"{n}+1=", [1], str(n + 1), {"data_source": "gsm8k", "extra_info": {"index": n}, "level": 1})
    for n in range(2)
]
SAMPLES = [Sample(ROWS[0], "1"), Sample(ROWS[1], "7")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "theirs.py").write_text(CODE)
    return tmp_path


def rewards(folder: Path, name: str, **options: Any) -> WeightedRewards:
    return WeightedRewards(RewardSpec(function=f"theirs.py:{name}", options=options), Sources(folder), "ground_truth")


@pytest.mark.parametrize(
    "name", ["compute_score", "with_parts", "in_a_batch", "reward_func", "in_a_mapping", "verified", "trl"]
)
def test_the_first_answer_is_right_and_the_second_wrong_in_every_form(folder: Path, name: str) -> None:
    found = rewards(folder, name)
    found.check_rows(ROWS)
    assert [parts.scores for parts in found.score(SAMPLES)] == [{name: 1.0}, {name: 0.0}]


def test_options_reach_a_function_that_is_called_for_each_sample(folder: Path) -> None:
    assert [p.scores["compute_score"] for p in rewards(folder, "compute_score", bonus=0.5).score(SAMPLES)] == [1.5, 0.5]


def test_a_chat_has_a_completion_of_messages(folder: Path) -> None:
    row = PromptRow("c", [{"role": "user", "content": "5+5="}], [1], "10", {})
    assert [p.scores for p in rewards(folder, "of_a_chat").score([Sample(row, "10")])] == [{"of_a_chat": 1.0}]


def test_what_a_form_does_not_give_must_be_an_option(folder: Path) -> None:
    with pytest.raises(InputError, match=r"theirs.py:needs needs the column 'difficulty', which row 1"):
        rewards(folder, "needs").check_rows(ROWS)
    rewards(folder, "needs", difficulty=3).check_rows(ROWS)
    row = PromptRow("d", "1+1=", [1], "2", {"difficulty": 0.25})
    assert [p.scores for p in rewards(folder, "needs").score([Sample(row, "2")])] == [{"needs": 0.25}]


def test_a_parser_of_verifiers_is_asked_for_in_vain(folder: Path) -> None:
    with pytest.raises(
        InputError, match=r"theirs.py:parsed needs the `parser` of a verifiers environment, which does not"
    ):
        rewards(folder, "parsed").check_rows(ROWS)
    rewards(folder, "with_own_parser").check_rows(ROWS)
    assert [p.scores["with_own_parser"] for p in rewards(folder, "with_own_parser").score(SAMPLES)] == [1.0, 0.0]


def test_a_mapping_without_rewards_is_no_list_of_scores(folder: Path) -> None:
    with pytest.raises(InputError, match="broken returned 1 scores for 2 completions"):
        rewards(folder, "broken").score(SAMPLES)
