"""Reward functions written for verifiers: told from TRL's by their names, and what their `state` has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

CODE = """
def without_completion(prompt, answer, **kw):
    return float(isinstance(prompt, str) and kw["completion"] == answer)

def of_the_state(state, answer):
    return float(state["completion"] == answer == state["answer"])

def of_a_chat(prompt, state):
    return float(state["completion"][-1]["content"] == state["answer"])

def knows(completion, state):
    asked = dict(prompt="1+1=", completion=completion, answer="2", info={"level": 1, "task": "sums"}, task="sums")
    assert state == asked, state
    state["seen"] = True
    return 1.0

def writes(prompt, completion, answer, info, state, notes):
    assert info is state["info"] and prompt is state["prompt"]
    assert (info, prompt, answer, notes) == ({"seen": []}, [{"content": "1+1="}], ["2"], [[]]), "of another sample"
    info["seen"].append(completion)
    prompt[0]["content"] = "else"
    answer.append("3")
    notes[0].append("looked at")
    return 1.0

def writes_in_verls_form(data_source, solution_str, ground_truth, extra_info):
    assert "seen" not in extra_info, "of another sample"
    extra_info["seen"] = solution_str
    return 1.0

def of_a_column(prompts, state):
    return [float(value) for value in state]

def of_a_column_by_name(state, **kw):
    return [float(value == text) for value, text in zip(state, kw["completions"])]
"""
COLUMNS: dict[str, Any] = {"level": 1, "task": "sums"}


def score(
    folder: Path, name: str, *responses: str, prompt: Any = "1+1=", answer: Any = "2", **columns: Any
) -> list[float | None]:
    (folder / "theirs.py").write_text(CODE)
    rewards = WeightedRewards(RewardSpec(function=f"theirs.py:{name}"), Sources(folder), "ground_truth")
    row = PromptRow("a", prompt, [1], answer, columns or COLUMNS)
    rewards.check_rows([row])
    return [parts.scores[name] for parts in rewards.score([Sample(row, text) for text in responses])]


@pytest.mark.parametrize("name", ["without_completion", "of_the_state"])
def test_one_that_names_no_completion_is_called_for_each_sample(tmp_path: Path, name: str) -> None:
    assert score(tmp_path, name, "2", "3", "2") == [1.0, 0.0, 1.0]


def test_the_state_has_what_is_known_of_each_sample_by_itself(tmp_path: Path) -> None:
    assert score(tmp_path, "knows", "2", "3") == [1.0, 1.0]
    assert score(tmp_path, "of_a_chat", "2", "3", prompt=[{"role": "user", "content": "1+1="}]) == [1.0, 0.0]


def test_what_a_function_writes_into_its_arguments_no_other_sample_sees(tmp_path: Path) -> None:
    given: dict[str, Any] = {"prompt": [{"content": "1+1="}], "answer": ["2"], "info": {"seen": []}, "notes": [[]]}
    assert score(tmp_path, "writes", "2", "3", "4", **given) == [1.0, 1.0, 1.0]
    assert given == {"prompt": [{"content": "1+1="}], "answer": ["2"], "info": {"seen": []}, "notes": [[]]}
    assert score(tmp_path, "writes_in_verls_form", "2", "3") == [1.0, 1.0]


def test_a_column_may_be_called_state(tmp_path: Path) -> None:
    assert score(tmp_path, "of_a_column", "3", state="2") == [2.0]
    assert score(tmp_path, "of_a_column_by_name", "2", "3", state="2") == [1.0, 0.0]
    remedy = "needs the column 'state', which row 1 .* add it to the data, add the parameter `completion` if it is wri"
    with pytest.raises(InputError, match=remedy):
        score(tmp_path, "of_a_column_by_name", "2")
