"""What the rollout engine can hold of a model: known from its configuration, before an engine has loaded anything."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ppo_core.engines.vllm_source import cpu_head_sizes
from ppo_core.records import GenerateJob, InputError, SamplingJob
from ppo_core.spec.sections import ComputeDtype

GIB = 1 << 30
NOT_FREE = "Available memory on node"
"""How vLLM's CPU worker begins to say that there is no memory for the cache."""
BYTES = {"float32": 4, "bfloat16": 2}
CPU_BLOCK, GPU_BLOCK = 128, 16
"""Tokens in one block of vLLM's cache."""
OTHER_CACHES = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "multi_query",
    "n_head_kv",
    "sliding_window",
)
"""Keys of configurations whose layers do not keep a key and a value of every head and token."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


Dtype = Literal["float32", "bfloat16"]


def weights_folder(checkpoint: Path, spec: GenerateJob) -> Path:
    """The model in a checkpoint that a job means. Raises InputError where there is none."""
    folder = checkpoint / spec.weights
    if not folder.is_dir():
        raise InputError(
            f"{checkpoint} has no weights `{spec.weights}`, because it was made without update.ema_decay: set "
            "evaluation.weights to policy"
        )
    return folder


def stored_dtype(policy: Path) -> Dtype:
    """What the folder's config.json says its weights are; float32 where it says nothing, or something else."""
    config = json.loads((policy / "config.json").read_text())
    return "bfloat16" if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else "float32"


@dataclass(frozen=True)
class Attention:
    """A model's attention: numbers of layers, heads and heads with keys and values, and the size of one head.

    `keeps_all`: every layer caches key and value of every token. `mlp` is the inner size of each layer's MLP, which
    tensor parallelism divides; 0 where that is not known, or it is many experts.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    keeps_all: bool
    mlp: int = 0

    def cache_bytes(self, tokens: int, *, dtype: str, ranks: int, block: int) -> int:
        """What the keys and values of one sequence take on each rank; one block of each layer vLLM keeps for itself."""
        blocks = -(-tokens // block) + 1
        return 2 * self.layers * max(1, self.kv_heads // ranks) * self.head_dim * BYTES[dtype] * blocks * block


def attention_of(config: Any) -> Attention | None:
    """The attention of a Hugging Face configuration; None where that does not say it in the common keys."""
    text = config.get_text_config()
    document = text.to_dict()

    def value(name: str) -> int:
        return document.get(text.attribute_map.get(name, name)) or 0

    layers, heads = value("num_hidden_layers"), value("num_attention_heads")
    head_dim = value("head_dim") or (value("hidden_size") // heads if heads else 0)
    if not (layers and heads and head_dim) or document.get("kv_lora_rank"):
        return None
    sliding = document.get("use_sliding_window") is not False
    others = [key for key in OTHER_CACHES if document.get(key) and (key != "sliding_window" or sliding)]
    kinds = set(document.get("layer_types") or ["full_attention"])
    return Attention(
        layers=layers,
        heads=heads,
        kv_heads=value("num_key_value_heads") or heads,
        head_dim=head_dim,
        keeps_all=not others and kinds == {"full_attention"},
        mlp=0 if any(document.get(key) for key in EXPERTS) else value("intermediate_size"),
    )


def sampling_dtype(config: Any, weights: Dtype, wanted: ComputeDtype) -> Dtype:
    """What vLLM computes in here: in bf16 what has such `weights`, else as products in training."""
    from ppo_core.models.precision import products_in_bf16

    rounded = weights == "bfloat16" or products_in_bf16(wanted, config.get_text_config().hidden_size)
    return "bfloat16" if rounded else "float32"


def check_limits(config: Any, spec: SamplingJob, context: int, *, dtype: Dtype, gpu: bool) -> None:
    """Raise InputError where vLLM can never sample `context` tokens from a policy of this configuration here."""
    attention = attention_of(config)
    ranks = spec.tensor_parallel_size
    if not gpu:
        check_memory(spec.kv_cache_gib, machine_memory_gib())
    if attention is not None:
        check_heads(attention, ranks=ranks, gpu=gpu)
        check_cache(attention, tokens=context, kv_cache_gib=spec.kv_cache_gib, dtype=dtype, ranks=ranks, gpu=gpu)


def check_heads(attention: Attention, *, ranks: int, gpu: bool) -> None:
    """Raise InputError for heads that vLLM cannot work with here. On a GPU some backend takes any size."""
    heads, kv_heads = attention.heads, attention.kv_heads
    if heads % kv_heads:
        raise InputError(
            f"the model's num_key_value_heads={kv_heads} does not divide its num_attention_heads={heads}: choose one "
            f"of {_divisors(heads)} for the former, or another model"
        )
    if attention.heads % ranks:
        raise InputError(
            f"engines.tensor_parallel_size={ranks} does not divide the model's {attention.heads} attention heads: "
            f"choose one of {_divisors(heads)}"
        )
    if max(kv_heads, ranks) % min(kv_heads, ranks):
        fitting = [size for size in _divisors(heads) if max(kv_heads, size) % min(kv_heads, size) == 0]
        raise InputError(
            f"engines.tensor_parallel_size={ranks} does not fit the model's num_key_value_heads={kv_heads}: "
            f"choose one of {fitting}"
        )
    if attention.mlp % ranks:
        fitting = [size for size in _divisors(heads) if attention.mlp % size == 0]
        raise InputError(
            f"engines.tensor_parallel_size={ranks} does not divide the model's intermediate_size={attention.mlp}: "
            f"choose one of {fitting}"
        )
    sizes = [] if gpu else cpu_head_sizes()
    if sizes and attention.head_dim not in sizes:
        raise InputError(
            f"the model's attention heads have a size (head_dim) of {attention.head_dim}, and vLLM on CPU takes only "
            f"{', '.join(str(size) for size in sizes)}: choose hidden_size and num_attention_heads in model.config so "
            f"that hidden_size / num_attention_heads is one of them, or set head_dim there; or take another model"
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def machine_memory_gib(root: Path = Path("/")) -> float:
    """What this machine has in all, or the control groups of this process let it have: in a container or a batch job
    the kernel ends who takes more."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_memory_limits(root)]) / GIB


def _memory_limits(root: Path) -> Iterator[int]:
    """Bytes, by cgroup v2 and v1, of each group that this process is in and that has a limit.

    A container may see the path of its group on the host, which it does not have: its own group is the topmost then.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for below in (Path(path.strip("/")), *Path(path.strip("/")).parents):
            with suppress(OSError, ValueError):  # there is no such group, or its limit is `max`
                yield int((top / below / name).read_text())


def check_memory(kv_cache_gib: float, memory_gib: float) -> None:
    """Raise InputError for a cache, which lies in main memory, that is larger than that."""
    if kv_cache_gib >= memory_gib:
        raise InputError(
            f"engines.kv_cache_gib={kv_cache_gib:g} is more than this machine's memory of {memory_gib:.1f} GiB, a "
            "container's limit counted, which also has to hold the models: lower it, for example to 1"
        )


def engines_refusal(said: str, *, kv_cache_gib: float, tokens: int) -> InputError | None:
    """A refusal of the cache or the model in the spec's words for what vLLM says in its own; None for anything else."""
    if needed := re.search(r"\(([0-9.]+) GiB KV cache is needed", said):
        return cache_too_small(kv_cache_gib, max(float(needed[1]), 0.01), tokens)
    if free := re.search(rf"{NOT_FREE} \d+ \(([0-9.]+)/([0-9.]+) GiB\) on kv cache", said):
        return InputError(
            f"engines.kv_cache_gib={kv_cache_gib:g} is more than the {free[1]} of {free[2]} GiB of memory that are "
            "free here: lower it, or stop other programs"
        )
    if re.search(r"not supported (for now|anymore|in-tree)", said):
        return InputError(
            f"vLLM cannot run this model ({said.partition('. ')[0]}): take one of another type, such as llama or qwen2"
        )
    return None


def check_cache(
    attention: Attention, *, tokens: int, kv_cache_gib: float, dtype: str, ranks: int, gpu: bool
) -> int | None:
    """How many sequences of `tokens` fit into the cache at once; None where that is not known.

    Raises InputError where not even one fits.
    """
    if not attention.keeps_all:
        return None
    block = GPU_BLOCK if gpu else CPU_BLOCK
    one = attention.cache_bytes(tokens, dtype=dtype, ranks=ranks, block=block)
    reserved = attention.cache_bytes(0, dtype=dtype, ranks=ranks, block=block)
    if one > kv_cache_gib * GIB:
        raise cache_too_small(kv_cache_gib, one / GIB, tokens)
    return int((kv_cache_gib * GIB - reserved) // (one - reserved))


def cache_too_small(kv_cache_gib: float, needed_gib: float, tokens: int) -> InputError:
    """The refusal of a cache that cannot hold one sequence."""
    return InputError(
        f"engines.kv_cache_gib={kv_cache_gib:g} is too small for one sequence of {tokens} tokens (the longest prompt "
        f"plus the response): raise it to at least {rounded_up(needed_gib):g}"
    )


def rounded_up(number: float) -> float:
    """To three digits that count, upwards: 0.012341 becomes 0.0124."""
    step = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / step) * step:.12g}")


def check_room(policy: Path, prompt_ids: list[int], max_tokens: int, *, trust_remote_code: bool) -> None:
    """Raise InputError for a prompt without tokens, and where the model has no room for it and the response."""
    from ppo_core.data.tokenization import context_length, model_config

    limit = context_length(model_config(str(policy), None, trust_remote_code=trust_remote_code))
    if not prompt_ids:
        raise InputError("the prompt has no tokens: give it some text")
    if limit is not None and len(prompt_ids) + max_tokens > limit:
        raise InputError(
            f"max_tokens={max_tokens} does not fit the model's context {limit} after the prompt of "
            f"{len(prompt_ids)} tokens: lower it to {max(limit - len(prompt_ids), 0)}, or shorten the prompt"
        )


def check_stop_texts(texts: Sequence[str], tokenizer: Any, model: Path | None, stop_token_ids: Sequence[int]) -> None:
    """Raise InputError for a text that holds special tokens: vLLM looks for it in what is left without those. Of the
    tokenizer, the `model` and the spec there are tokens that end a response by themselves."""
    from ppo_core.data import tokenization  # transformers: two thirds of a second

    own = [tokenizer.eos_token_id] if model is None else tokenization.stop_token_ids(tokenizer, model)
    ending = {*stop_token_ids, *own}
    for text in texts:
        ids, special = tokenization.special_tokens_in(tokenizer, text)
        if special and not (len(ids) == 1 and ids[0] in ending):
            remedy = f"set rollout.stop_token_ids={special} in its place" if ids == special else "leave those out"
            raise InputError(
                f"rollout.stop has {text!r}, which would end nothing: {tokenizer.decode(special)} is special, and "
                f"responses are searched without special tokens; {remedy}"
            )


def check_stop_tokens(token_ids: Sequence[int], vocabulary: int) -> None:
    """Raise InputError for ids that are none of the tokenizer's: they would end nothing."""
    if unknown := [token for token in token_ids if token >= vocabulary]:
        raise InputError(
            f"rollout.stop_token_ids={unknown} are not in the tokenizer's vocabulary of {vocabulary} tokens: give ids "
            f"below {vocabulary}"
        )
