"""The benchmark of the training engine measures what it says: its FLOP are those of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import PROMPT, SHAPES, flop_of, write_rollouts_and_scores
from ppo_core.data.tables import read_rollouts, read_scores

ROOT = Path(__file__).parents[2]
TWO_ITERATIONS = """
import sys
from pathlib import Path

from benchmarks.shapes import SHAPES
from benchmarks.training_jobs import Work, open_engine

engine = open_engine(1)
training = {"compute_dtype": "float32", "zero_stage": 0, "num_ranks": 1}
work = Work(engine, Path(sys.argv[1]), SHAPES["tiny"], training, "float32")
work.start()
for number in range(2):
    work.iterate(number)
engine.ranks.dismiss()
"""


def test_its_flop_are_those_that_torch_counts() -> None:
    shape, response = SHAPES["tiny"], 7
    config = AutoConfig.for_model(vocab_size=shape.vocabulary, **shape.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    total = PROMPT + response
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((1, total), dtype=torch.long))
    hidden, layers = shape.config["hidden_size"], shape.config["num_hidden_layers"]
    unseen = 2 * total * total * hidden * layers  # a causal model needs half of the attention that torch counts
    heads = 2 * PROMPT * hidden * shape.vocabulary  # the benchmark counts the head at response positions alone
    counted = counter.get_total_flops() - unseen - heads
    parameters = sum(parameter.numel() for parameter in model.parameters())
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    ours = flop_of(shape, parameters - norms, [response])
    critic = counted - 2 * response * hidden * shape.vocabulary
    assert ours == {"experience": 2 * counted + critic, "steps": 3 * (counted + critic) * shape.epochs}


def test_lengths_are_spread_evenly(tmp_path: Path) -> None:
    shape = SHAPES["27M"]
    lengths = write_rollouts_and_scores(shape, tmp_path)
    assert sorted(lengths)[:: len(lengths) - 1] == [8, 64]
    assert sum(lengths) == pytest.approx(len(lengths) * 36, rel=0.01)
    rows, scores = read_rollouts(tmp_path / "rollouts.parquet"), read_scores(tmp_path / "scores.parquet")
    assert [len(row.response_token_ids) for row in rows] == lengths
    assert [row.prompt_id for row in rows] == [row.prompt_id for row in scores]


@pytest.mark.thorough
def test_the_disk_holds_the_start_and_one_policy(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", TWO_ITERATIONS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"tokenizer", "start", "checkpoint1"}
    assert [path.name for path in (tmp_path / "checkpoint1").iterdir() if path.is_dir()] == ["policy"]


@pytest.mark.parametrize("shape", ["qwen-0.5B", "qwen-1.5B"])
def test_a_minibatch_of_a_large_model_fills_a_microbatch(shape: str) -> None:
    """Of at least 16,384 tokens; `benchmarks.gpu.TOKENS` has how many a GPU of 80 GB holds at once."""
    given = SHAPES[shape]
    tokens = given.responses * (PROMPT + (given.shortest + given.longest) / 2)
    assert tokens / given.minibatches >= 16_384


@pytest.mark.thorough
def test_it_is_done_at_another_size_too() -> None:
    sizes = ["--responses", "4", "--shortest", "3", "--longest", "3", "--vocabulary", "50"]
    command = [sys.executable, "-m", "benchmarks.training_jobs", "tiny", "--iterations", "1", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert (measured["tokens"], measured["all_tokens"]) == (12, 12 + 4 * PROMPT)
    assert all(seconds > 0 for seconds in measured["seconds"].values())
    assert 0 < measured["useful_flop_over_matmul_rate"]["steps"] < 1
    assert measured["memory_mib"]["idle"] > 0
