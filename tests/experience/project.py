"""A user's own folder: a spec, prompts, a reward function and a small model, all of it right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ppo_core.data.tokenization import load_tokenizer
from ppo_core.models.loading import create_policy
from tests.e2e.launch import ROOT

TOKENIZER = ROOT / "examples" / "arithmetic" / "tokenizer"
SPEC = """\
name: mine
iterations: 2
dataset:
  train: prompts.jsonl
  evaluation: held_out.jsonl
  max_prompt_tokens: 16
model:
  path: model
reward:
  function: rewards.py:correct
rollout:
  prompts_per_iteration: 8
  max_response_tokens: 16
update:
  num_minibatches: 2
  warmup_iterations: 1
training:
  microbatch_size: 4
evaluation:
  num_prompts: 4
engines:
  kv_cache_gib: 0.25
"""
REWARDS = """\
from math import isclose
from typing import Any


def correct(prompts, completions, answer, **columns: Any):
    return [1.0 if isclose(len(text), len(right)) else 0.0 for text, right in zip(completions, answer)]
"""
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONTEXT = 64


def make_model(folder: Path) -> Path:
    """A llama of 2 heads of 32, with the tokenizer of the arithmetic example, as `save_pretrained` writes it."""
    tokenizer = load_tokenizer(TOKENIZER)
    config = {"model_type": "llama", **SIZES, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True}
    create_policy(config, vocab_size=len(tokenizer), seed=0, dtype="float32").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_project(folder: Path, rows: list[dict[str, Any]], model: Path) -> Path:
    """The spec of a reward model that learns from these rows, and from the same ones of another prompt."""
    write_rows(folder / "pairs.jsonl", rows)
    write_rows(folder / "held_out.jsonl", [{**row, "prompt": "8+5="} for row in rows])
    spec = {"dataset": {"train": "pairs.jsonl", "evaluation": "held_out.jsonl"}, "model": {"path": str(model)}}
    (folder / "spec.yaml").write_text(json.dumps(spec))
    return folder / "spec.yaml"


def make_project(folder: Path, model: Path) -> Path:
    """The folder, with a copy of the model."""
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC)
    (folder / "rewards.py").write_text(REWARDS)
    for name, count in (("prompts.jsonl", 16), ("held_out.jsonl", 8)):
        write_rows(folder / name, [{"prompt": f"{n % 10}+{n // 10}=", "answer": f"{n % 10}"} for n in range(count)])
    shutil.copytree(model, folder / "model")
    return folder


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """As JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text that is there."""
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))


def edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON document; None takes one away."""
    document = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
