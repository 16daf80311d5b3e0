"""Left-to-right arithmetic on a clock of ten hours: `7+5*3-8=` is 8, because 7+5=2, 2*3=6, 6-8=8 modulo 10.

A run's spec names the functions below (`generate.py:prompts`); each yields rows and can be called without arguments.
As a script it writes the same rows to JSONL files, or the tokenizer's folder:

    python examples/arithmetic/generate.py --out DIR
    python examples/arithmetic/generate.py --tokenizer DIR

The same arguments give the same bytes, always. Every prompt is distinct. Its sha256 decides whether it is for training
or held out, so nothing that is trained on is ever measured on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
TERMS = (4, 6)
TRAIN_SHARE = 90
"""Of 100 buckets of prompts, so many are for training; the rest is held out."""
CAREFUL_SHARE = 0.35
"""Of the supervised examples, so many reason before they answer; the rest answers at once."""

Row = dict[str, Any]


def prompts(count: int = 8192, seed: int = 0) -> Iterator[Row]:
    """Distinct prompts for PPO with their right answers: `{"prompt": "7+5*3-8=", "answer": "8"}`."""
    for prompt in _distinct(count, f"prompts {seed}", is_for_training):
        yield {"prompt": prompt, "answer": answer_of(prompt)}


def graded(count: int = 8192, seed: int = 0) -> Iterator[Row]:
    """The same prompts with their number of terms, for `dataset.curriculum`: `{…, "terms": 4}`."""
    for row in prompts(count, seed):
        yield {**row, "terms": len(row["prompt"]) // 2}


def held_out(count: int = 512, seed: int = 0) -> Iterator[Row]:
    """Rows as `prompts` makes them, of prompts that no training ever sees."""
    for prompt in _distinct(count, f"held out {seed}", lambda prompt: not is_for_training(prompt)):
        yield {"prompt": prompt, "answer": answer_of(prompt)}


def sft_examples(count: int = 20_000, seed: int = 0) -> Iterator[Row]:
    """Examples for the supervised start: some reason step by step, most answer directly; all of them are right.

    A small model learns the single steps quickly and the whole sum at once hardly at all, so afterwards its direct
    answers are mostly wrong. It is left to PPO to find out that reasoning pays.
    """
    choices = random.Random(f"careful {seed}")
    for prompt in _distinct(count, f"sft {seed}", is_for_training):
        careful = choices.random() < CAREFUL_SHARE
        thought = f"<think>{','.join(steps_of(prompt))}</think>" if careful else ""
        yield {"prompt": prompt, "completion": f"{thought}<answer>{answer_of(prompt)}</answer>"}


def is_for_training(prompt: str) -> bool:
    """Whether a prompt belongs to the training split; a hash decides, so every seed and every process agree."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 100 < TRAIN_SHARE


def steps_of(prompt: str) -> list[str]:
    """The single steps: `["7+5=2", "2*3=6", "6-8=8"]` for `7+5*3-8=`."""
    digits, operators = prompt[0:-1:2], prompt[1:-1:2]
    value, steps = int(digits[0]), []
    for operator, digit in zip(operators, digits[1:], strict=True):
        result = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[operator] % 10
        steps.append(f"{value}{operator}{digit}={result}")
        value = result
    return steps


def answer_of(prompt: str) -> str:
    """The right answer, one digit."""
    return steps_of(prompt)[-1][-1]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer: one token for each printable ASCII character, line break and tag."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in (("tokenizer.json", _tokenizer()), ("tokenizer_config.json", _tokenizer_config())):
        (folder / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _tokenizer() -> dict[str, Any]:
    characters = "\n" + "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " "))
    words = [*SPECIAL_TOKENS, *TAGS, *characters]
    added = [
        {
            "id": words.index(word),
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            # The tags are ordinary words of an answer: a special token would vanish from the decoded text.
            "special": word in SPECIAL_TOKENS,
        }
        for word in (*SPECIAL_TOKENS, *TAGS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        # Without this decoder the words would be joined by spaces.
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }


def _distinct(count: int, stream: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    # Each use draws from a stream of its own, so that asking for more of one never changes another.
    draws = random.Random(stream)
    seen: set[str] = set()
    while len(seen) < count:
        prompt = _prompt(draws)
        if prompt not in seen and wanted(prompt):
            seen.add(prompt)
            yield prompt


def _prompt(draws: random.Random) -> str:
    text = str(draws.randint(0, 9))
    for _ in range(draws.randint(*TERMS) - 1):
        text += draws.choice("+-*") + str(draws.randint(2, 9))
    return text + "="


def main(arguments: list[str] | None = None) -> None:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write the arithmetic task's data or its tokenizer.")
    parser.add_argument("--out", type=Path, help="folder for sft.jsonl, prompts.jsonl and eval.jsonl")
    parser.add_argument("--tokenizer", type=Path, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--sft", type=int, default=20_000, help="number of supervised examples")
    parser.add_argument("--prompts", type=int, default=8192, help="number of prompts for PPO")
    parser.add_argument("--eval", type=int, default=512, help="number of held-out prompts")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts of the same splits")
    chosen = parser.parse_args(arguments)
    if chosen.out is None and chosen.tokenizer is None:
        parser.error("nothing to write: give --out DIR for the data or --tokenizer DIR for the tokenizer")
    if chosen.tokenizer is not None:
        write_tokenizer(chosen.tokenizer)
    if chosen.out is not None:
        write_rows(chosen.out / "sft.jsonl", sft_examples(chosen.sft, chosen.seed))
        write_rows(chosen.out / "prompts.jsonl", prompts(chosen.prompts, chosen.seed))
        write_rows(chosen.out / "eval.jsonl", held_out(chosen.eval, chosen.seed))


if __name__ == "__main__":
    main()
