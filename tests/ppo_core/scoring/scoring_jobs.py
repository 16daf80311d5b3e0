"""A user's data and reward functions, and the scoring engine's jobs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ppo_core.data.tables import write_rollouts
from ppo_core.records import RolloutRow
from tests.ppo_core.engines.engine_jobs import Client
from tests.ppo_core.tiny_policies import EOS

REWARDS = """
from __future__ import annotations
import asyncio, json, os, subprocess, sys
from dataclasses import dataclass

@dataclass
class Seen:
    words: int

def length(prompts, completions, **columns):
    return [float(Seen(len(text.split())).words) for text in completions]

def level(completions, level, bonus=0.0):
    return [value + bonus for value in level]

async def later(completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)

def talks(completions, **columns):
    print('{"event": "result", "id": 1, "seconds": 0, "result": {}}')
    os.write(1, b"not JSON\\n")
    subprocess.run([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], check=True)
    return [float(len(sys.stdin.read()))] * len(completions)

def messages(prompts, completions, **columns):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert all(c[0]["role"] == "assistant" and len(c) == 1 for c in completions)
    return [float(len(c[0]["content"])) for c in completions]

def raises(completions, **columns):
    raise ConnectionError("the judge does not answer")

def nan(completions, **columns): return [0.0] * (len(completions) - 1) + [float("nan")]
def short(completions, **columns): return [1.0]
def nothing(completions, **columns): return None
def text(completions, **columns): return ["1.0"] * len(completions)
def nobody(completions, **columns): return [None] * len(completions)
def exact(completions, answer): return [float(json.loads(text) == right) for text, right in zip(completions, answer)]
def some(completions, **columns): return [None, *[1.0] * (len(completions) - 1)]
"""
ROWS = [
    {"prompt": "w1 w2", "answer": 7, "level": 1},
    {"prompt": "w3", "answer": "eight", "level": 2},
    {"prompt": "w3", "answer": "eight", "level": 2},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(client: Client, sources: Path, start: Path, function: str = "length", **changes: Any) -> Path:
    """`start`: the folder of the model, or of the tokenizer where a model's configuration is among the changes."""
    dataset = {"train": "train.jsonl", **changes.pop("dataset", {})}
    spec = {
        "dataset": dataset,
        "model": {"path": str(start)},
        "sft_data": None,
        "max_response_tokens": 8,
        "num_eval_prompts": 2,
        "reward": {"function": f"my_rewards.py:{function}"},
        **changes,
    }
    output = client.output()
    weights = {"model": start} if "path" in spec["model"] else {}
    client.run("prepare_dataset", {"sources": sources, "tokenizer": start, **weights}, spec, output)
    return output


def score(client: Client, sources: Path, dataset: Path, reward: dict[str, Any], responses: list[str]) -> list[Any]:
    """The scores as they lie in the table; responses in the order of the dataset's rows."""
    rows = pq.read_table(dataset / "train.parquet").to_pylist()
    rollouts = [
        RolloutRow(row["prompt_id"], 0, row["prompt_token_ids"], [5, EOS], text, [-1.0, -1.0], finish)
        for row, text, finish in zip(rows, responses, ["stop", "length", "stop"], strict=True)
    ]
    folder, output = client.output(), client.output()
    write_rollouts(folder / "rollouts.parquet", rollouts)
    inputs = {"sources": sources, "rollouts": folder, "dataset": dataset}
    client.run("score_rollouts", inputs, {"reward": reward, "answer_column": "answer", "split": "train"}, output)
    return pq.read_table(output / "scores.parquet").to_pylist()
