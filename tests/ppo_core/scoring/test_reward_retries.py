"""A function that is called for each sample and raises: which samples it is called for again, and how often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.reward import RewardFailed, Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

CODE = """
import asyncio
import builtins
from pathlib import Path

calls = Path(__file__).with_name("calls")

def judge(solution_str):
    with calls.open("a") as file:
        file.write(f"{solution_str}\\n")
    wanted, _, kind = solution_str.partition(" ")
    if calls.read_text().splitlines().count(solution_str) <= int(wanted):
        raise getattr(builtins, kind)("so it is")
    return 1.0

async def judge_later(completion):
    return judge(completion[0]["content"] if isinstance(completion, list) else completion)

room = asyncio.Semaphore(1)

async def in_turns(completion):
    async with room:
        await asyncio.sleep(0)
        return judge(completion)

async def together(completions):
    return list(await asyncio.gather(*map(in_turns, completions)))

def none(solution_str):
    judge("0 none")
    return None

def quotes(solution_str):
    if solution_str == "bad":
        raise ValueError("no choice: \\ud83d" + "x" * 10**6)
    return 1.0

async def cancels(completion):
    if completion == "bad":
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task
    return 1.0
"""
"""A sample says how often what is raised for it: `2 OSError`."""


def scored(folder: Path, name: str, texts: list[str], **settings: Any) -> tuple[list[Any], Counter[str]]:
    """The scores, or what is said of none; and how often each sample was called for."""
    (folder / "rewards.py").write_text(CODE)
    (folder / "calls").write_text("")
    source = {"kind": "function", "function": f"rewards.py:{name}", **settings}
    found = WeightedRewards(RewardSpec.model_validate({"sources": [source]}), Sources(folder), "answer")
    rows = [Sample(PromptRow(str(number), "What?", [1], None, {}), text) for number, text in enumerate(texts)]
    parts = found.score(rows)
    return [part.error() or part.scores[name] for part in parts], Counter((folder / "calls").read_text().splitlines())


@pytest.mark.parametrize("name", ["in_turns", "together"])
def test_what_a_module_makes_once_for_its_coroutines_serves_every_call_and_try(tmp_path: Path, name: str) -> None:
    retried = "1 OSError" if name == "in_turns" else "0 also"
    for texts in (["0 a", "0 b", retried], ["0 c", "0 d", "0 e"]):
        scores, _ = scored(tmp_path, name, texts)
        assert scores == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["judge", "judge_later"])
def test_a_sample_that_it_raises_for_is_asked_about_again_after_the_others(tmp_path: Path, name: str) -> None:
    texts = ["1 OSError", "0 right", "2 OSError", "1 TypeError"]
    (first, right, twice, wrong), calls = scored(tmp_path, name, texts)
    assert (first, right) == (1.0, 1.0)
    assert twice.startswith(
        f"not scored by {name}: the reward function rewards.py:{name} raised OSError: so it is (rew"
    )
    assert twice.endswith(") (after 2 tries)")
    assert "raised TypeError: so it is (rewards.py" in wrong
    assert "tries" not in wrong
    assert calls == {"1 OSError": 2, "0 right": 1, "2 OSError": 2, "1 TypeError": 1}
    again, calls = scored(tmp_path, name, texts, retries=2)
    assert (again[:3], calls["2 OSError"]) == ([1.0, 1.0, 1.0], 3)
    never, calls = scored(tmp_path, name, texts, retries=0)
    assert (never[1], set(calls.values())) == (1.0, {1})


def test_no_score_is_an_answer(tmp_path: Path) -> None:
    assert scored(tmp_path, "none", ["a", "b"]) == (["not scored by none"] * 2, {"0 none": 2})


def test_where_it_raises_for_all_the_stage_fails_and_is_tried_again_unless_its_code_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RewardFailed, match=r"raised OSError: so it is \(rewards.py:\d+\) \(after 2 tries\)$"):
        scored(tmp_path, "judge", ["9 OSError", "8 OSError"])
    with pytest.raises(InputError, match=r"raised TypeError: so it is \(rewards.py:\d+\)$"):
        scored(tmp_path, "judge", ["9 TypeError", "8 TypeError"])


def test_what_is_raised_can_be_stored_whatever_it_quotes(tmp_path: Path) -> None:
    (good, said), _ = scored(tmp_path, "quotes", ["good", "bad"])
    assert good == 1.0
    assert r"raised ValueError: no choice: \ud83dxxx" in said
    assert said.encode()
    assert len(said) < 3000


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_task_that_was_cancelled_below_a_call_costs_that_sample_alone(
    timeout_s: float | None, tmp_path: Path
) -> None:
    (good, said), _ = scored(tmp_path, "cancels", ["good", "bad"], timeout_s=timeout_s)
    assert good == 1.0
    assert "raised RuntimeError: a task that it awaits was cancelled" in said
