"""How many texts a second a reward model scores: the reward kind `model` beside a plain loop of transformers.

    python -m benchmarks.reward_model [--shape 27M] [--samples 192] [--rounds 3]

Texts have 24 to 128 tokens. The plain loop is given them in order of length, in batches
that are as long as their longest, of each size in turn; its best one counts. Both tokenize. Prints medians and writes
`benchmarks/results/reward_model.json`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from benchmarks import report
from benchmarks.shapes import PROMPT, SHAPES, Shape, write_tokenizer
from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow
from ppo_core.scoring.reward import Sample
from ppo_core.scoring.weighted import WeightedRewards
from ppo_core.spec import RewardSpec

SHORTEST, LONGEST = 8, 112
BATCHES = (8, 16, 32, 64)


def main() -> None:
    """Both sides in turns."""
    parser = report.arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="27M")
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    samples = made_up(given.samples, shape.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder) / "rm")
        sides: dict[str, Callable[[], list[float]]] = {"the reward kind `model`": scored_here(samples, Path(folder))}
        sides |= {f"plain, batches of {size}": plain_loop(samples, Path(folder) / "rm", size) for size in BATCHES}
        found = {name: (side(), list[float]())[1] for name, side in sides.items()}  # once for nothing: they load
        for _ in range(given.rounds):
            said = {name: timed(side, found[name]) for name, side in sides.items()}
    ours, *plain = said.values()
    apart = max(abs(one - other) for scores in plain for one, other in zip(ours, scores, strict=True))
    rate = {name: given.samples / statistics.median(spent) for name, spent in found.items()}
    mine, *theirs = rate.values()
    report.show("texts scored", ("", "a second"), [*rate.items(), ("over the best plain loop", mine / max(theirs))])
    figures = {"seconds": found, "over_plain": mine / max(theirs), "largest_difference": apart}
    report.save("reward_model", given, figures)


def made_up(count: int, vocabulary: int) -> list[Sample]:
    """Prompts of `PROMPT` words, and responses of any number from the shortest to the longest."""
    dice = Random(0)

    def words(number: int) -> str:
        return " ".join(f"w{dice.randrange(2, vocabulary)}" for _ in range(number))

    lengths = [SHORTEST + (LONGEST - SHORTEST) * number // max(count - 1, 1) for number in range(count)]
    dice.shuffle(lengths)
    rows = [PromptRow(str(number), words(PROMPT) + " ", [2], None, {}) for number in range(count)]
    return [Sample(row, words(length)) for row, length in zip(rows, lengths, strict=True)]


def write_model(shape: Shape, folder: Path) -> None:
    """A classifier with one label, never trained."""
    torch.manual_seed(0)
    write_tokenizer(shape.vocabulary, folder)
    values = {**shape.config, "vocab_size": shape.vocabulary, "num_labels": 1, "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(**values)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def scored_here(samples: list[Sample], folder: Path) -> Callable[[], list[float]]:
    """As the scoring engine does."""
    spec = RewardSpec.model_validate({"sources": [{"kind": "model", "path": "rm"}]})
    rewards = WeightedRewards(spec, Sources(folder, digest="made up"), "answer")
    return lambda: [float(rewards.total(parts.scores) or 0.0) for parts in rewards.score(samples)]


def plain_loop(samples: list[Sample], folder: Path, size: int) -> Callable[[], list[float]]:
    """What a script would do that knows of padding."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, pad_token="<eos>")

    @torch.inference_mode()
    def score() -> list[float]:
        texts = [f"{sample.row.prompt}{sample.response}" for sample in samples]
        order = sorted(range(len(texts)), key=lambda row: len(texts[row].split()))
        found = [0.0] * len(texts)
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            batch = tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt")
            for row, logit in zip(rows, model(**batch).logits[:, 0].tolist(), strict=True):
                found[row] = logit
        return found

    return score


def timed(side: Callable[[], list[float]], spent: list[float]) -> list[float]:
    """What it says; adds its seconds."""
    started = time.perf_counter()
    said = side()
    spent.append(time.perf_counter() - started)
    return said


if __name__ == "__main__":
    main()
