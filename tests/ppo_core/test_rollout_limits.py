"""What the rollout engine can hold: counted by hand, and its own list of head sizes."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.data.tokenization import model_config
from ppo_core.engines.rollout_limits import (
    Attention,
    attention_of,
    check_cache,
    check_heads,
    cpu_head_sizes,
    rounded_up,
)
from ppo_core.records import InputError
from tests.ppo_core.tiny_models import tiny_config

PLAIN = Attention(layers=3, heads=8, kv_heads=4, head_dim=32, keeps_all=True)
GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [("llama", 2), ("qwen2", 1), ("gpt2", 2)],
)
def test_the_shape_of_attention_is_read_whatever_a_model_calls_it(name: str, kv_heads: int) -> None:
    found = attention_of(model_config(None, tiny_config(name), 40))
    assert found == Attention(layers=2, heads=2, kv_heads=kv_heads, head_dim=16, keeps_all=True)


@pytest.mark.parametrize(("model_type", "known"), [("gemma3_text", True), ("mistral", True), ("deepseek_v3", False)])
def test_a_cache_that_is_counted_otherwise_is_left_to_the_engine(model_type: str, known: bool) -> None:
    found = attention_of(model_config(None, {"model_type": model_type}))
    assert (found is not None) == known
    assert found is None or not found.keeps_all
    if found is not None:
        assert check_cache(found, tokens=10**6, kv_cache_gib=1e-9, dtype="float32", ranks=1, gpu=False) is None


def test_one_sequence_takes_whole_blocks_and_vllm_keeps_one() -> None:
    # Keys and values: 2 x 3 layers x 4 heads x 32 numbers x 4 bytes = 3,072 bytes a token; 130 tokens fill two blocks
    # of 128, and vLLM keeps a third: 384 x 3,072.
    one = 384 * 3072
    fits: dict[str, Any] = {"tokens": 130, "dtype": "float32", "ranks": 1, "gpu": False}
    assert check_cache(PLAIN, kv_cache_gib=one / GIB, **fits) == 1
    with pytest.raises(InputError, match=r"kv_cache_gib=0\.001 is too small for one sequence of 130 .* 0\.0011$"):
        check_cache(PLAIN, kv_cache_gib=0.001, **fits)
    assert check_cache(PLAIN, kv_cache_gib=0.0011, **fits) == 1
    halves = {**fits, "dtype": "bfloat16", "ranks": 2}
    assert check_cache(PLAIN, kv_cache_gib=one / 4 / GIB, **halves) == 1


def test_the_installed_backend_says_which_heads_it_takes() -> None:
    sizes = cpu_head_sizes()
    assert {64, 128} <= set(sizes)
    assert 16 not in sizes
    with pytest.raises(InputError, match=r"\(head_dim\) of 16, and vLLM on CPU takes only 32, .* model\.config"):
        check_heads(Attention(2, 4, 4, 16, keeps_all=True), ranks=1, gpu=False)
    check_heads(PLAIN, ranks=1, gpu=False)
    check_heads(Attention(2, 4, 4, 16, keeps_all=True), ranks=1, gpu=True)


def test_ranks_share_heads_evenly() -> None:
    with pytest.raises(InputError, match=r"tensor_parallel_size=3 does not divide .* 8 .* one of \[1, 2, 4, 8\]"):
        check_heads(PLAIN, ranks=3, gpu=True)


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.0123401, 0.0124), (1.0, 1.0), (12.01, 12.1), (0.00073242, 0.000733)]
)
def test_what_is_advised_is_never_too_little(number: float, rounded: float) -> None:
    assert rounded_up(number) == rounded
