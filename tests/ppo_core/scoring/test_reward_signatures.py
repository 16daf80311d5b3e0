"""Reward functions written for other trainers, in the forms that those call them in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow, RolloutRow
from ppo_core.scoring.reward import RewardFailed, Sample
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

def joined(queries, prompts, labels):
    return [float(prompt == label and query == f"{label}!") for query, prompt, label in zip(queries, prompts, labels)]

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

def with_columns(completions, bonus=0.0, **columns):
    return [bonus for _ in completions]

def needs(solution_str, ground_truth, difficulty):
    return difficulty

def measured(data_source, solution_str, ground_truth, extra_info):
    right = solution_str == ground_truth
    beside = {"acc": right, "pred": solution_str, "far": float("nan"), **({"sure": 0.5} if right else {})}
    return {"score": float(right), **beside}

def logged(queries, prompts, labels):
    scores = reward_func(queries, prompts, labels)
    return {"rewards": scores, "extra_logs": {"length": torch.tensor([3, 4])}}

def logged_as(queries, logs):
    values = {"number": 0.5, "tensor": torch.tensor(0.5), "text": "ab", "short": [1.0], "long": torch.ones(3)}
    return {"rewards": [1.0, 0.0], "extra_logs": {"right": [1, 2], logs: values[logs]}}

def raises(solution_str, ground_truth):
    return 1.0 / (solution_str == ground_truth)

async def raises_later(completion, answer):
    await asyncio.sleep(0.01)
    return 1.0 / (completion == answer)

async def hangs(completion, answer):
    await asyncio.sleep(0 if completion == answer else 3600)
    return 1.0

async def all_hang(completions, **columns):
    await asyncio.sleep(3600)

def not_finite(solution_str):
    return {"1": 1.0, "7": float("nan"), "8": float("-inf")}[solution_str]

def parts_not_finite(solution_str):
    return [{"start": 0, "end": 1, "score": not_finite(solution_str)}]

def plain(solution_str):
    return 0.0

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


def check(folder: Path, name: str, **options: Any) -> None:
    """As before a run begins."""
    rewards(folder, name, **options).check_options()


@pytest.mark.parametrize(
    "name", ["compute_score", "with_parts", "in_a_batch", "reward_func", "in_a_mapping", "verified", "trl"]
)
def test_the_first_answer_is_right_and_the_second_wrong_in_every_form(folder: Path, name: str) -> None:
    found = rewards(folder, name)
    found.check_rows(ROWS)
    assert [parts.scores for parts in found.score(SAMPLES)] == [{name: 1.0}, {name: 0.0}]


def test_numbers_beside_a_score_are_measured_and_count_for_nothing(folder: Path) -> None:
    rollouts = [RolloutRow(sample.row.prompt_id, 0, [1], [2], sample.response, [0.0], "stop") for sample in SAMPLES]
    found = rewards(folder, "measured").score_rollouts(ROWS, rollouts)
    assert [(one.score, one.error, one.components) for one in found] == [
        (1.0, None, {"measured": 1.0, "measured/acc": 1.0, "measured/sure": 0.5}),
        (0.0, None, {"measured": 0.0, "measured/acc": 0.0, "measured/sure": None}),
    ]
    logged = rewards(folder, "logged").score(SAMPLES)
    assert [(one.scores, one.measures) for one in logged] == [
        ({"logged": 1.0}, {"logged/length": 3.0}),
        ({"logged": 0.0}, {"logged/length": 4.0}),
    ]


@pytest.mark.parametrize(
    ("logs", "found"),
    [
        ("number", "one float, no list"),
        ("tensor", "one Tensor, no list"),
        ("text", "one str, no list"),
        ("short", "1 numbers"),
        ("long", "3 numbers"),
    ],
)
def test_what_is_logged_has_a_number_for_each_completion(folder: Path, logs: str, found: str) -> None:
    expected = rf"theirs.py:logged_as returned {found} as extra_logs\['{logs}'\] for 2 completions: return one number"
    with pytest.raises(InputError, match=expected):
        rewards(folder, "logged_as", logs=logs).score(SAMPLES)


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_a_call_that_raises_leaves_its_sample_without_a_score(folder: Path, name: str) -> None:
    right, wrong = rewards(folder, name).score(SAMPLES)
    assert (right.scores, right.error(), wrong.scores) == ({name: 1.0}, None, {name: None})
    assert re.search(rf"theirs.py:{name} raised ZeroDivisionError: .* \(theirs.py:\d+\)$", wrong.error() or "")
    with pytest.raises(InputError, match=rf"theirs.py:{name} raised ZeroDivisionError"):
        rewards(folder, name).score([SAMPLES[1]])


def with_deadline(folder: Path, name: str) -> WeightedRewards:
    source = {"kind": "function", "function": f"theirs.py:{name}", "timeout_s": 2.0}
    return WeightedRewards(RewardSpec.model_validate({"sources": [source]}), Sources(folder), "ground_truth")


def test_a_call_that_hangs_leaves_its_sample_without_a_score_at_its_deadline(folder: Path) -> None:
    right, hung = with_deadline(folder, "hangs").score(SAMPLES)
    assert (right.scores, hung.scores) == ({"hangs": 1.0}, {"hangs": None})
    assert "theirs.py:hangs raised TimeoutError: no score within timeout_s=2" in (hung.error() or "")
    with pytest.raises(RewardFailed, match=r"theirs.py:all_hang raised TimeoutError: no score within timeout_s=2"):
        with_deadline(folder, "all_hang").score(SAMPLES)
    with pytest.raises(InputError, match=r"timeout_s=2 of .*theirs.py:raises has no effect: .*; write it with"):
        with_deadline(folder, "raises")


@pytest.mark.parametrize("name", ["not_finite", "parts_not_finite"])
def test_a_number_that_is_not_finite_leaves_its_sample_without_a_score(folder: Path, name: str) -> None:
    samples = [*SAMPLES, Sample(ROWS[1], "8")]
    found = rewards(folder, name).score(samples)
    assert [one.scores[name] for one in found] == [1.0, None, None]
    assert re.match(rf"not scored by {name}: its score (is|has) nan.*: return .*finite", found[1].error() or "")
    with pytest.raises(InputError, match=rf"theirs.py:{name}: score 0 (is|has) nan"):
        rewards(folder, name).score(samples[1:])


@pytest.mark.parametrize("name", ["compute_score", "in_a_batch", "reward_func", "verified"])
def test_an_answer_that_is_needed_must_be_there(folder: Path, name: str) -> None:
    row = PromptRow("d", "1+1=", [1], None, {"data_source": "gsm8k", "level": 1})
    with pytest.raises(
        InputError, match=rf"{name} needs the column 'ground_truth'( as its .*)?, which row 2 .* lacks: add"
    ):
        rewards(folder, name).check_rows([ROWS[0], row])
    rewards(folder, "plain").check_rows([row])


def test_options_reach_a_function_that_is_called_for_each_sample(folder: Path) -> None:
    assert [p.scores["compute_score"] for p in rewards(folder, "compute_score", bonus=0.5).score(SAMPLES)] == [1.5, 0.5]


FIXED = {
    "compute_score": ("solution_str", "ground_truth"),
    "in_a_batch": ("solution_strs", "extra_infos"),
    "verified": ("completion", "prompt", "answer"),
    "reward_func": ("queries", "prompts", "labels"),
    "trl": ("prompts", "completions", "completion_ids"),
}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, given in FIXED.items() for option in given])
def test_no_option_takes_the_place_of_what_the_form_gives(folder: Path, name: str, option: str) -> None:
    refusal = rf"the option {option} of the reward function theirs.py:{name} has the name of an argument .*{option}.*: "
    with pytest.raises(InputError, match=rf"{refusal}leave it out, or rename it, .*$"):
        check(folder, name, **{option: "mine"})


def test_an_option_that_no_function_takes_is_refused(folder: Path) -> None:
    listed = r"\(theirs.py:compute_score takes data_source, extra_info, bonus\)"
    with pytest.raises(InputError, match=rf"option bonsu is taken by no .* given to {listed}; did you mean bonus\?$"):
        check(folder, "compute_score", bonsu=1.0)
    with pytest.raises(InputError, match=r"option limit .*takes no options\): leave it out, or add the parameter$"):
        check(folder, "plain", limit=1)
    check(folder, "verified", limit=1)
    with pytest.raises(InputError, match="the option bonsus is taken by no"):  # nor one that is nearly its own
        check(folder, "with_columns", bonsus=1)


def test_what_the_data_do_not_say_may_be_an_option(folder: Path) -> None:
    for name, option in (("compute_score", "data_source"), ("compute_score", "extra_info"), ("verified", "info")):
        check(folder, name, **{option: "gsm8k"})
    (score, _) = rewards(folder, "compute_score", data_source="gsm8k").score(SAMPLES)
    assert score.scores == {"compute_score": 1.0}


def test_options_that_a_run_has_on_record_still_load(folder: Path) -> None:
    assert [p.scores for p in rewards(folder, "plain", limit=1).score(SAMPLES)]


def test_an_option_for_all_functions_is_for_any_of_them(folder: Path) -> None:
    def load(*names: str, **spec: Any) -> None:
        spec["function"] = {f"theirs.py:{name}": 1.0 for name in names}
        WeightedRewards(RewardSpec.model_validate(spec), Sources(folder), "ground_truth").check_options()

    load("compute_score", "plain", options={"bonus": 0.5})
    with pytest.raises(InputError, match=r"option factor .*\(theirs.py:compute_score takes .*; theirs.py:plain takes"):
        load("compute_score", "plain", options={"factor": 0.5})
    own = {"function": "theirs.py:not_finite", "options": {"bonus": 1.0}}
    with pytest.raises(InputError, match=r"option bonus .*\(theirs.py:not_finite takes no options\)"):
        load("compute_score", options={"bonus": 0.5}, sources=[own])


def test_a_chat_has_a_completion_of_messages(folder: Path) -> None:
    row = PromptRow("c", [{"role": "user", "content": "5+5="}], [1], "10", {})
    assert [p.scores for p in rewards(folder, "of_a_chat").score([Sample(row, "10")])] == [{"of_a_chat": 1.0}]


def test_messages_that_only_call_tools_have_an_empty_text(folder: Path) -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    chat = [{"role": "user", "content": "5+5="}, calls, {**calls, "content": None}, {"role": "tool", "content": "10"}]
    row = PromptRow("c", chat, [1], "5+5=\n\n\n10", {})
    assert [p.scores for p in rewards(folder, "joined").score([Sample(row, "!")])] == [{"joined": 1.0}]


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
    missing = r"broken returned a mapping without the key 'rewards' \(it has: reward\): return the scores under it"
    with pytest.raises(InputError, match=missing):
        rewards(folder, "broken").score(SAMPLES)
