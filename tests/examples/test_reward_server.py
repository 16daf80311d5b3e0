"""The example's reward as a server, asked by the reward kind `http`."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec
from tests.ports import free_port
from tests.waiting import until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def server() -> Iterator[str]:
    """Its address."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLE), "--port", str(port), "reward_server:app"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: listens(port), "the reward server")
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_the_server_scores_as_the_function_does(server: str) -> None:
    row = PromptRow("a", "7+5*3-8=", [1], "8", {})
    texts = ["<think>7+5=2,2*3=6,6-8=8</think><answer>8</answer>", "<answer>1</answer>", "8"]
    samples = [Sample(row, text) for text in texts]
    sources = [{"kind": "http", "url": f"{server}/score"}, {"function": "reward.py:correct"}]
    rewards = WeightedRewards(RewardSpec.model_validate({"sources": sources}), Sources(EXAMPLE), "answer")
    scored = [parts.scores for parts in rewards.score(samples)]
    assert [parts["http"] for parts in scored] == [parts["correct"] for parts in scored] == [1.1, 0.1, 0.0]


def test_the_server_takes_all_that_is_sent(server: str) -> None:
    """Messages that only call tools, tokens, and rows without a reference answer."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
    chat = [{"role": "user", "content": "7+5="}, called, {"role": "tool", "content": "2", "tool_call_id": "1"}]
    rows = [PromptRow("a", chat, [1], "2", {"level": 1}), PromptRow("b", "7+5=", [1], None, {})]
    source = {"kind": "http", "url": f"{server}/score"}
    rewards = WeightedRewards(RewardSpec.model_validate({"sources": [source]}), Sources(EXAMPLE), "answer")
    samples = [Sample(row, "<answer>2</answer>", [4, 5, 1]) for row in rows]
    assert [parts.scores["http"] for parts in rewards.score(samples)] == [1.1, None]
