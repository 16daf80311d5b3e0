"""Tiny causal LMs of several architectures with a real tokenizer, made on the spot; and a forward pass to compare with.

Heads are 32 wide: vLLM's attention on the CPU takes no narrower ones.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

SPECIAL = ["<pad>", "<eos>", "<unk>", "<end>"]
PAD, EOS, UNK, END = range(4)
WORDS = [f"w{number}" for number in range(60)]
VOCABULARY = [*SPECIAL, *WORDS, "user", "assistant"]
LETTERS = [*SPECIAL, *string.ascii_letters, *string.digits[:9], "Ġ"]
CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
ARCHITECTURES = ("llama", "qwen2", "gpt2")


def make_tokenizer(*, chat: bool = False, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """One token per word; unknown words are <unk>."""
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(tokenizer, chat=chat, pad=pad)


def make_letter_tokenizer(*, chat: bool, pad: str) -> PreTrainedTokenizerFast:
    """One token per letter, in the form of Qwen2's and GPT-2's: beside a Qwen2 model transformers takes no other."""
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, chat=chat, pad=pad)


def _wrapped(tokenizer: Tokenizer, *, chat: bool, pad: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<end>"],
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def make_policy(
    folder: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    seed: int = 0,
    chat: bool = False,
    pad: str = "<pad>",
    eos: list[int] | None = None,
    letters: bool = False,
) -> Path:
    """A Hugging Face folder. `eos`: what generation_config.json says, where it shall say anything."""
    tokenizer = (make_letter_tokenizer if letters else make_tokenizer)(chat=chat, pad=pad)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(architecture, tied, len(tokenizer), tokenizer.pad_token_id))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if eos is not None:
        GenerationConfig(eos_token_id=eos, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder


def forward_logprobs(folder: Path, prompt: list[int], response: list[int], *, temperature: float) -> list[float]:
    """Logprobs of `response` after `prompt` by one forward pass of transformers in float32."""
    with torch.no_grad():
        logits = load(folder)(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[range(len(response)), response].tolist()


def next_probabilities(folder: Path, prompt: list[int], *, temperature: float) -> torch.Tensor:
    """Of every token after `prompt`."""
    with torch.no_grad():
        return torch.softmax(load(folder)(torch.tensor([prompt])).logits[0, -1] / temperature, -1)


def greedy_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The likeliest token again and again, until EOS."""
    model, tokens = load(folder), list(prompt)
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@cache
def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _config(architecture: str, tied: bool, vocab_size: int, pad: int) -> Any:
    shared = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": pad,
    }
    if architecture == "gpt2":
        return GPT2Config(n_embd=64, n_head=2, n_layer=2, n_positions=CONTEXT, **shared)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[architecture]
    return kind(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        **shared,
    )
