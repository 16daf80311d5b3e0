"""Tiny models of three architectures and a tokenizer, made on the spot, with weights far enough from each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppo_core.models.loading import create_policy
from ppo_core.records import TokenSequence

VOCABULARY = 40
CONTEXT = 32
EOS = 1
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT},
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}w7{% endif %}"


def tiny_config(name: str) -> dict[str, Any]:
    """A configuration as a spec's `model.config` has it; large initial weights, so that no two tokens look alike."""
    limit = {} if name == "gpt2" else {"max_position_embeddings": CONTEXT}
    ends = {"eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS}
    return {**CONFIGS[name], **limit, **ends, "initializer_range": 0.3}


def tiny_policy(name: str, *, seed: int = 0, dtype: str = "float32") -> Any:
    return create_policy(tiny_config(name), vocab_size=VOCABULARY, seed=seed, dtype=dtype)


def tiny_tokenizer(*, eos: bool = True, chat: bool = False) -> PreTrainedTokenizerFast:
    """Words w2 to w39, split at spaces; pad is EOS."""
    words = {"<unk>": 0, "<eos>": EOS, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"eos_token": "<eos>", "pad_token": "<eos>"} if eos else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **ends)
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_folder(folder: Path, name: str, *, seed: int = 0) -> Path:
    """A Hugging Face folder with the tokenizer in it."""
    tiny_policy(name, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def ragged_sequences(count: int, *, seed: int = 0) -> list[TokenSequence]:
    """Prompts of 1 to 6 and responses of 1 to 9 tokens, EOS among them."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    return [TokenSequence(tokens(6), [*tokens(8), EOS]) for _ in range(count)]
