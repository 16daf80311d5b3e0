"""Models and rollouts to measure with: made up, of the sizes and lengths that matter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

PROMPT = 16


@dataclass(frozen=True)
class Shape:
    """A model, and the responses of an iteration: their lengths are spread evenly from `shortest` to `longest`."""

    config: dict[str, Any]
    vocabulary: int
    responses: int
    shortest: int
    longest: int
    epochs: int
    minibatches: int = 4


def llama(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """A Llama with tied embeddings."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


def qwen(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """A Qwen2 with grouped heads and tied embeddings."""
    return {**llama(hidden, inner, layers, heads), "model_type": "qwen2", "num_key_value_heads": 2}


SHAPES = {
    "tiny": Shape(llama(32, 64, 2, 2), 100, 8, 2, 8, 1, 2),
    "demo": Shape(llama(128, 384, 3, 4), 103, 256, 4, 44, 2),
    "demo-start": Shape(llama(128, 384, 3, 4), 103, 256, 6, 26, 2),
    "27M": Shape(llama(512, 1536, 8, 8), 32_000, 128, 8, 64, 1),
    "27M-fixed": Shape(llama(512, 1536, 8, 8), 32_000, 128, 64, 64, 1),
    "qwen-tiny": Shape(qwen(32, 64, 2, 4), 100, 8, 2, 8, 1, 2),
    "qwen-0.5B": Shape(qwen(896, 4864, 24, 14), 151_936, 256, 128, 512, 1),
    "qwen-1.5B": Shape(qwen(1536, 8960, 28, 12), 151_936, 256, 128, 512, 1),
}


def flop_of(shape: Shape, parameters: int, lengths: list[int]) -> dict[str, float]:
    """Of real tokens alone: linear layers, causal attention, and the policy's head at response positions.

    A backward pass is two forward passes; nothing that is recomputed counts. `parameters` are the policy's. `steps` are
    the update's.
    """
    hidden, layers = shape.config["hidden_size"], shape.config["num_hidden_layers"]
    linear = parameters - shape.vocabulary * hidden
    totals = [PROMPT + length for length in lengths]
    trunk = sum(2 * linear * total + 2 * total * total * hidden * layers for total in totals)
    policy, critic = trunk + 2 * sum(lengths) * hidden * shape.vocabulary, trunk
    return {"experience": 2 * policy + critic, "steps": 3 * (policy + critic) * shape.epochs}


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Words w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1} | {f"w{number}": number for number in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def write_rollouts_and_scores(shape: Shape, folder: Path) -> list[int]:
    """Random tokens of evenly spread lengths in a shuffled order, and random scores. Returns the lengths."""
    from ppo_core.data.tables import write_rollouts, write_scores
    from ppo_core.records import RolloutRow, ScoreRow

    dice, count = Random(0), shape.responses
    span = shape.longest - shape.shortest
    lengths = [shape.shortest + round(span * number / max(count - 1, 1)) for number in range(count)]
    dice.shuffle(lengths)

    def tokens(length: int) -> list[int]:
        return [dice.randrange(2, shape.vocabulary) for _ in range(length)]

    rollouts = [
        RolloutRow(f"p{number}", 0, tokens(PROMPT), tokens(length), "", [-1.0] * length, "stop")
        for number, length in enumerate(lengths)
    ]
    scores = [ScoreRow(row.prompt_id, 0, dice.random(), {}, False, None) for row in rollouts]
    write_rollouts(folder / "rollouts.parquet", rollouts)
    write_scores(folder / "scores.parquet", scores)
    return lengths
