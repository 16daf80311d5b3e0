"""A pytest plugin: engines that test modules share, for importing vLLM takes longer than their jobs; and user data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ppo_core.engines.engine_jobs import Client, open_engine
from tests.ppo_core.scoring.scoring_jobs import REWARDS, ROWS, write_lines
from tests.ppo_core.tiny_policies import make_policy


@pytest.fixture(scope="session")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = open_engine("rollout", tmp_path_factory.mktemp("rollout"))
    yield client
    client.engine.close()


@pytest.fixture(scope="session")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = open_engine("scoring", tmp_path_factory.mktemp("scoring"))
    yield client
    client.engine.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("model") / "model", chat=True)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "my_rewards.py").write_text(REWARDS)
    write_lines(folder / "train.jsonl", ROWS)
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
    write_lines(folder / "chat.jsonl", chats)
    write_lines(folder / "sft.jsonl", [{"prompt": "w1 w2", "completion": "w5 w6"}])
    write_lines(
        folder / "sevens.jsonl",
        [{"prompt": "w1 w2", "answer": 7}, {"prompt": "w3", "answer": "7"}, {"prompt": "w4", "answer": "x = 7"}],
    )
    return folder
