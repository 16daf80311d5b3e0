"""Preferences over short answers to "how do I …" questions, which follow a hidden rule: `helpfulness`.

The specs name the functions below (`generate.py:preferences`); each yields rows and can be called without arguments. A
reward model sees pairs of answers alone, and has to find the rule; PPO then sees the reward model alone, and `gold`
shows beside it how helpful the answers really are.

As a script it writes the same rows to JSONL files, or the tokenizer's folder:

    python examples/helpful/generate.py --out DIR
    python examples/helpful/generate.py --tokenizer DIR

The same arguments give the same bytes, always. The sha256 of a prompt decides whether it is for training or held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
TASKS = ("fix", "clean", "paint", "build", "move", "sell")
KINDS = ("old", "new", "red", "small", "big", "blue")
THINGS = ("bike", "roof", "lamp", "chair", "radio", "clock", "fence", "pump", "boat", "drum", "stove", "door")
CAREFUL = ("wash", "oil", "measure", "test")
CARELESS = ("kick", "drop", "shake", "hammer")
OPENERS = (" sure ,", " well ,", " hm ,", " no idea ,")
CLOSERS = (" . good luck !", " . bye .", " .")
STEPS = (1, 3)
TRAIN_SHARE = 85
"""Of 100 buckets of prompts, so many are for training; the rest is held out."""

Row = dict[str, str]


def helpfulness(prompt: str, answer: str) -> float:
    """The hidden rule: each careful step is worth 1 and each careless one costs 1, of the first three; each one more
    costs 1, for nobody reads so long an answer; a friendly beginning or end is worth 0.5, and who has no idea loses 1.

    >>> helpfulness("how do I fix the old bike ?", " sure , oil it , then test it . good luck !")
    3.0

    No pair of `preferences` has more than three steps, so what a reward model thinks of longer answers is a guess.
    """
    deeds = [word for word in answer.split() if word in CAREFUL + CARELESS]
    score = float(sum(1 if deed in CAREFUL else -1 for deed in deeds[: STEPS[1]])) - len(deeds[STEPS[1] :])
    score += 0.5 * answer.startswith(OPENERS[0]) + 0.5 * answer.endswith(CLOSERS[0])
    return score - answer.startswith(OPENERS[3])


def gold(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The hidden rule as a reward function."""
    return [helpfulness(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]


def preferences(count: int = 4096, seed: int = 0) -> Iterator[Row]:
    """Pairs of answers to prompts for training: `{"prompt": …, "chosen": …, "rejected": …}`."""
    return _pairs(count, f"preferences {seed}", _prompts(training=True))


def held_out_preferences(count: int = 512, seed: int = 0) -> Iterator[Row]:
    """Rows as `preferences` makes them, of prompts that no training ever sees."""
    return _pairs(count, f"held-out preferences {seed}", _prompts(training=False))


def sft_examples(count: int = 4096, seed: int = 0) -> Iterator[Row]:
    """Answers of every sort, for a policy that knows the form and not what is helpful."""
    draws, known = random.Random(f"sft {seed}"), _prompts(training=True)
    for _ in range(count):
        prompt = draws.choice(known)
        yield {"prompt": prompt, "completion": _answer(draws)}


def prompts() -> Iterator[Row]:
    """The prompts for training, without answers."""
    return ({"prompt": prompt} for prompt in _prompts(training=True))


def held_out() -> Iterator[Row]:
    """The other ones."""
    return ({"prompt": prompt} for prompt in _prompts(training=False))


def is_for_training(prompt: str) -> bool:
    """Whether a prompt belongs to the training split; a hash decides, so every seed and every process agree."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 100 < TRAIN_SHARE


def _prompts(*, training: bool) -> list[str]:
    every = [f"how do I {task} the {kind} {thing} ?" for task, kind, thing in product(TASKS, KINDS, THINGS)]
    return [prompt for prompt in every if is_for_training(prompt) == training]


def _pairs(count: int, stream: str, known: list[str]) -> Iterator[Row]:
    draws = random.Random(stream)
    for _ in range(count):
        prompt = draws.choice(known)
        worse, better = 0.0, 0.0
        while worse == better:
            answers = sorted((_answer(draws) for _ in range(2)), key=lambda text: helpfulness(prompt, text))
            worse, better = (helpfulness(prompt, text) for text in answers)
        yield {"prompt": prompt, "chosen": answers[1], "rejected": answers[0]}


def _answer(draws: random.Random) -> str:
    deeds = [draws.choice(CAREFUL + CARELESS) for _ in range(draws.randint(*STEPS))]
    return f"{draws.choice(OPENERS)}{' , then'.join(f' {deed} it' for deed in deeds)}{draws.choice(CLOSERS)}"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer: one token for each word with the space before it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in (("tokenizer.json", _tokenizer()), ("tokenizer_config.json", _tokenizer_config())):
        (folder / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _tokenizer() -> dict[str, Any]:
    phrases = ("do I the ? then it", *TASKS, *KINDS, *THINGS, *CAREFUL, *CARELESS, *OPENERS, *CLOSERS)
    inside = {word for phrase in phrases for word in phrase.split()}
    words = [*SPECIAL_TOKENS, "how", *(f" {word}" for word in sorted(inside))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": words.index(word), "content": word, **flags} for word in SPECIAL_TOKENS],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": " ?[^ ]+"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        # Without this decoder the words would be joined by more spaces.
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


def main(arguments: list[str] | None = None) -> None:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(description="Write the preferences over answers, or their tokenizer.")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for preferences.jsonl, eval.jsonl, sft.jsonl, prompts.jsonl and held_out.jsonl",
    )
    parser.add_argument("--tokenizer", type=Path, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--pairs", type=int, default=4096, help="number of pairs to train on")
    parser.add_argument("--eval", type=int, default=512, help="number of held-out pairs")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other answers to the same prompts")
    chosen = parser.parse_args(arguments)
    if chosen.out is None and chosen.tokenizer is None:
        parser.error("nothing to write: give --out DIR for the data or --tokenizer DIR for the tokenizer")
    if chosen.tokenizer is not None:
        write_tokenizer(chosen.tokenizer)
    if chosen.out is not None:
        write_rows(chosen.out / "preferences.jsonl", preferences(chosen.pairs, chosen.seed))
        write_rows(chosen.out / "eval.jsonl", held_out_preferences(chosen.eval, chosen.seed))
        write_rows(chosen.out / "sft.jsonl", sft_examples(seed=chosen.seed))
        write_rows(chosen.out / "prompts.jsonl", prompts())
        write_rows(chosen.out / "held_out.jsonl", held_out())


if __name__ == "__main__":
    main()
