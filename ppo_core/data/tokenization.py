"""Tokenizers and context lengths of any Hugging Face causal LM."""

from __future__ import annotations

import difflib
import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import transformers

from ppo_core.processes.lean_imports import leave_out_unused
from ppo_core.records import InputError, Messages, needs_own_code

REMOTE_CODE = "trust_remote_code"
"""In what transformers says of a folder with code of its own. What it advises, no user of ours can do."""

ALIKE = 0.9
"""Of two names, one of which is a misspelt other one."""
LONG_ROPE = "longrope"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
"""As transformers' classes call them; without any, there is nothing to tell of why none could be loaded."""


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The fast or slow tokenizer at `path`. Raises InputError when there is none, or none with an EOS token."""
    remedy = "put tokenizer.json and tokenizer_config.json there, or name their folder in model.tokenizer"
    tokenizer = any_tokenizer(path, remedy, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {path} has no EOS token, so a response could never end: set eos_token in its "
            "tokenizer_config.json"
        )
    return tokenizer


def any_tokenizer(path: str | Path, remedy: str, *, trust_remote_code: bool) -> Any:
    """The fast or slow tokenizer at `path`. Raises InputError, which ends with the remedy, when there is none."""
    leave_out_unused()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        # Some tokenizer classes come up empty in a folder that has a config.json and no tokenizer.
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")
    except Exception as error:
        if REMOTE_CODE in str(error):
            raise needs_own_code(path) from None
        there = any(found for name in TOKENIZER_FILES for found in Path(path).glob(name))
        why = f" that can be loaded ({type(error).__name__}: {shortened(error)})" if there else ""
        raise InputError(f"{path} has no tokenizer{why}: {remedy}") from error
    return tokenizer


def check_kept(tokenizer: Any, config: Any, *, trust_remote_code: bool = False) -> None:
    """Raise InputError where transformers reads another tokenizer out of the policy's folder than is saved into it.

    For some model types it takes the type's own tokenizer class, whatever tokenizer.json says: text would change
    between training and use, without a word.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    ids = list(range(min(len(tokenizer), 1000)))
    text = tokenizer.decode(ids)
    if again.decode(ids) != text or again(text).input_ids != tokenizer(text).input_ids:
        raise InputError(
            f"with a model of type {config.model_type}, transformers loads this tokenizer as {type(again).__name__}, "
            "which gives other tokens: use a tokenizer made for that model type, or another model_type"
        )


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Token ids of a prompt: text as it is (with the tokenizer's own BOS), messages through the chat template."""
    (ids,) = encode_prompts(tokenizer, [prompt])
    return ids


def encode_prompts(tokenizer: Any, prompts: Sequence[str | Messages]) -> list[list[int]]:
    """The same of many prompts, in two calls of the tokenizer: of texts, and of messages."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    of_texts = iter(tokenizer(texts, return_attention_mask=False).input_ids if texts else [])
    of_chats = iter(_encode_chats(tokenizer, chats) if chats else [])
    return [next(of_texts if isinstance(prompt, str) else of_chats) for prompt in prompts]


def _encode_chats(tokenizer: Any, chats: list[Messages]) -> list[list[int]]:
    if not tokenizer.chat_template:
        raise InputError(
            "prompts are lists of messages, but the tokenizer has no chat template: give prompts as text, or a "
            "tokenizer with chat_template"
        )
    try:
        return list(tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise InputError(
            f"the tokenizer's chat template rejects the messages ({type(error).__name__}: {shortened(error)}): change "
            "their roles or contents as it says"
        ) from error


def encode_completions(tokenizer: Any, completions: Sequence[str]) -> list[list[int]]:
    """Token ids of completions, each closed by EOS: what the policy shall learn to write. One call of the tokenizer."""
    if not completions:
        return []
    encoded = tokenizer(list(completions), add_special_tokens=False, return_attention_mask=False).input_ids
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


def scored_tokens(tokenizer: Any, prompt: str | Messages, response: str, folder: str | Path) -> list[int]:
    """What a reward model reads: of a text prompt and what follows it, or of messages and the assistant's, as the chat
    template of the tokenizer in `folder` writes them."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt + response)["input_ids"])
    if not tokenizer.chat_template:
        raise InputError(
            f"the prompts are messages, and the tokenizer of {folder} has no chat_template: add the one that "
            "the reward model was trained with"
        )
    messages = [*prompt, {"role": "assistant", "content": response}]
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(
            f"the chat_template of {folder} cannot format messages with the roles "
            f"{', '.join(str(message.get('role')) for message in messages)} ({type(error).__name__}: "
            f"{shortened(error)}): use prompts in the form that the reward model was trained on"
        ) from error


def special_tokens_in(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """The token ids of a text, and those among them of special tokens that it writes out."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    return ids, [token for token in ids if token in tokenizer.all_special_ids and tokenizer.decode([token]) in text]


def decode_response(tokenizer: Any, token_ids: list[int]) -> str:
    """Text of a response without the EOS (and without special tokens such as padding)."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stop_token_ids(tokenizer: Any, model_folder: Path) -> list[int]:
    """EOS of the tokenizer, and those that the model's generation config adds (chat models often end a turn so)."""
    ids = {int(tokenizer.eos_token_id)}
    if (model_folder / "generation_config.json").is_file():
        eos = transformers.GenerationConfig.from_pretrained(model_folder).eos_token_id
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return sorted(ids)


def model_config(
    path: str | None,
    config: dict[str, Any] | None,
    vocab_size: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """The Hugging Face configuration named by a spec's `model` section."""
    try:
        if path is not None:
            return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        settings = dict(config or {})
        if vocab_size is not None:
            settings.setdefault("vocab_size", vocab_size)
        return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    except Exception as error:
        if REMOTE_CODE in str(error):
            raise needs_own_code(path) from None
        where = "model.config" if path is None else f"model {path}"
        if unknown := _unknown_type(_stored_type(path) if path is not None else (config or {}).get("model_type")):
            raise InputError(f"{where}: {unknown}") from None
        raise InputError(f"{where}: no usable configuration ({type(error).__name__}: {shortened(error)})") from error


def check_config_keys(settings: dict[str, Any]) -> None:
    """Raise InputError for a key that is nearly one of the type's: transformers keeps what it does not know, and takes
    its default for what was meant. What it reads without keeping it is left alone."""
    kind = settings["model_type"]
    try:
        plain, built = transformers.AutoConfig.for_model(kind), model_config(None, settings)
    except Exception:  # a type without defaults
        return
    known = {*vars(plain), *plain.attribute_map, *inspect.signature(type(plain).__init__).parameters}
    named = [name for name in known if not name.startswith("_")]
    for key in settings.keys() & vars(built).keys() - known:
        close = difflib.get_close_matches(key, named, n=1, cutoff=ALIKE)
        if close:
            raise InputError(f"model.config.{key}: unknown key of {kind}; did you mean {close[0]}?")


def _stored_type(path: str) -> Any:
    return transformers.PreTrainedConfig.get_config_dict(path)[0].get("model_type")


def _unknown_type(model_type: Any) -> str | None:
    """What is wrong with a type that transformers does not know; it would list all four hundred."""
    known = sorted(transformers.CONFIG_MAPPING)
    if model_type in known:
        return None
    close = difflib.get_close_matches(str(model_type), known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ": name one that it knows, such as llama"
    return f"model_type={model_type!r} is unknown to the installed transformers{hint}"


def shortened(error: Exception, limit: int = 300) -> str:
    """What a library says, in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def context_length(config: Any) -> int | None:
    """Longest prompt plus response that the model can read, None where the configuration sets no limit.

    With LongRoPE (Ding et al. 2024, arXiv:2402.13753) that of its first training: where one text of a pass is longer,
    other frequencies go for all texts of that pass, so that logprobs would depend on a response's neighbours.
    """
    known = config.get_text_config().to_dict()
    limit = known.get("max_position_embeddings", known.get("n_positions"))
    rope = known.get("rope_parameters") or {}
    if rope.get("rope_type") == LONG_ROPE:
        limit = rope.get("original_max_position_embeddings") or known.get("original_max_position_embeddings") or limit
    return int(limit) if limit else None
