"""Reward models whose weights ranks share, in processes of their own; see `training_program`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, LlamaConfig, RobertaConfig

from ppo_core.models.classifier import load_classifier
from ppo_core.models.shared_classifier import SharedClassifier
from ppo_core.processes.aside import Aside
from ppo_core.processes.ranks import Ranks
from tests.ppo_core.tiny_models import CONTEXT, VOCABULARY

Facts = dict[str, Any]
ENDS = {"vocab_size": VOCABULARY, "num_labels": 1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **ENDS, max_position_embeddings=CONTEXT, initializer_range=0.1),
    "gpt2": GPT2Config(n_embd=128, n_layer=2, n_head=2, n_positions=CONTEXT, **ENDS, initializer_range=0.1),
    "roberta": RobertaConfig(**SIZES, **ENDS, max_position_embeddings=CONTEXT + 2, initializer_range=0.1),
}
"""Large enough that most of their parameters are shared, and not kept whole."""
CASES = {
    "small": ("llama", "float32", 1),
    "large": ("llama", "float32", 40),
    # All texts together use the whole vocabulary, so none of it can be padding: nine passes, and none for rank 1 last.
    "uneven": ("llama", "float32", 4096),
    "bf16": ("llama", "bfloat16", 40),
    "gpt2": ("gpt2", "float32", 40),
    "roberta": ("roberta", "float32", 40),
}


def write_model(folder: Path, name: str) -> Path:
    """A reward model of CONFIGS, whose scores differ from text to text."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(CONFIGS[name]).save_pretrained(folder)
    return folder


def texts() -> list[list[int]]:
    """Seven of 1 to 20 tokens, some of equal length, and two that use the whole vocabulary between them."""
    generator = torch.Generator().manual_seed(3)
    ragged = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 20, 1, 3, 7, 12, 9)]
    return [*ragged, list(range(20)), list(range(20, VOCABULARY))]


def score(root: Path, ranks: Ranks) -> Facts:
    """What every case says of the texts, twice: the second time after all that is held was aside for a while.

    `held` has the bytes that each rank holds between passes, `whole` those of the model.
    """
    facts: Facts = {}
    if ranks.is_first:
        for name in CONFIGS:
            write_model(root / name, name)
    ranks.barrier()
    for case, (name, dtype, budget) in CASES.items():
        folder = root / name
        whole = load_classifier(folder, dtype=dtype, trust_remote_code=False) if ranks.is_first else None
        size = 0 if whole is None else sum(p.numel() * p.element_size() for p in whole.parameters())
        model, aside = SharedClassifier(folder, ranks, dtype=dtype, whole=whole), Aside()
        told: list[int] = []
        first = model.scores(texts(), budget, told.append)
        held = torch.zeros(ranks.world_size)
        held[ranks.rank] = sum(one.numel() * one.element_size() for one in model.tensors())
        aside.move(model.tensors())
        left = sum(one.untyped_storage().nbytes() for one in model.tensors())
        aside.bring_back()
        facts[case] = {
            "first": first,
            "again": model.scores(texts(), budget),
            "told": told,
            "held": ranks.sum(held).tolist(),
            "whole": size,
            "left": left,
        }
    return facts


SCENARIOS: dict[str, Callable[[Path, Ranks], Facts]] = {"score": score}
