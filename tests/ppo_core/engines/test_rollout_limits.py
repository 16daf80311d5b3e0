"""What the rollout engine can hold: counted by hand, and its own list of head sizes."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ppo_core.data.tokenization import model_config
from ppo_core.engines.rollout_limits import (
    NOT_FREE,
    Attention,
    attention_of,
    check_cache,
    check_heads,
    check_memory,
    check_stop_texts,
    engines_refusal,
    machine_memory_gib,
    rounded_up,
)
from ppo_core.engines.vllm_source import cpu_head_sizes
from ppo_core.records import InputError
from tests.ppo_core.tiny_models import tiny_config, tiny_tokenizer

PLAIN = Attention(layers=3, heads=8, kv_heads=4, head_dim=32, keeps_all=True)
GIB = 2**30
OWN = "proc/self/cgroup"


@pytest.mark.parametrize(
    ("name", "kv_heads", "mlp"),
    [("llama", 2, 48), ("qwen2", 1, 48), ("gpt2", 2, 0)],
)
def test_the_shape_of_attention_is_read_whatever_a_model_calls_it(name: str, kv_heads: int, mlp: int) -> None:
    found = attention_of(model_config(None, tiny_config(name), 40))
    assert found == Attention(layers=2, heads=2, kv_heads=kv_heads, head_dim=16, keeps_all=True, mlp=mlp)


def test_of_a_model_with_experts_the_inner_size_is_not_known() -> None:
    found = attention_of(model_config(None, {"model_type": "mixtral"}))
    assert found is not None
    assert found.mlp == 0


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


def test_ranks_share_the_inner_size_of_an_mlp_evenly() -> None:
    six = replace(PLAIN, heads=6, kv_heads=6, mlp=1024)
    with pytest.raises(
        InputError, match=r"tensor_parallel_size=3 does not divide .* intermediate_size=1024: choose one of \[1, 2\]"
    ):
        check_heads(six, ranks=3, gpu=True)
    check_heads(six, ranks=2, gpu=True)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "message"),
    [
        (3, 1, r"num_key_value_heads=3 does not divide its num_attention_heads=8: choose one of \[1, 2, 4, 8\]"),
        (6, 1, r"num_key_value_heads=6 does not divide"),
    ],
)
def test_heads_that_share_keys_and_values_unevenly_are_refused(kv_heads: int, ranks: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_heads(replace(PLAIN, kv_heads=kv_heads), ranks=ranks, gpu=True)


def test_ranks_share_keys_and_values_as_vllm_does() -> None:
    """It gives each rank as many of these heads, or each head to as many ranks."""
    twelve = replace(PLAIN, heads=12, kv_heads=4)
    with pytest.raises(
        InputError, match=r"tensor_parallel_size=6 does not fit .*num_key_value_heads=4: choose one of \[1, 2, 4, 12\]"
    ):
        check_heads(twelve, ranks=6, gpu=True)
    for ranks in (1, 2, 4, 12):
        check_heads(twelve, ranks=ranks, gpu=True)


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    memory = machine_memory_gib()
    with pytest.raises(
        InputError, match=r"kv_cache_gib=2e\+06 is more than this machine's memory of [0-9.]+ GiB, .*: low"
    ):
        check_memory(2e6, memory)
    check_memory(memory / 2, memory)


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({OWN: "0::/\n", "memory.max": "1073741824\n"}, 1.0),
        ({OWN: "0::/a.slice/b.service\n", "a.slice/memory.max": "536870912\n", "memory.max": "max\n"}, 0.5),
        (
            {
                OWN: "0::/a.slice/b.service\n",
                "a.slice/memory.max": "1073741824\n",
                "a.slice/b.service/memory.max": "268435456\n",
            },
            0.25,
        ),
        # Version 1, in a container that sees the host's path; and in a job.
        ({OWN: "4:memory:/docker/f00\n1:cpu:/docker/f00\n", "memory/memory.limit_in_bytes": "1073741824\n"}, 1.0),
        ({OWN: "2:cpu,memory:/job\n0::/\n", "memory/job/memory.limit_in_bytes": "536870912\n"}, 0.5),
    ],
)
def test_the_memory_of_a_container_or_a_job_is_what_its_limit_leaves(
    tmp_path: Path, files: dict[str, str], gib: float
) -> None:
    assert machine_memory_gib(with_files(tmp_path, files)) == gib


@pytest.mark.parametrize(
    "files",
    [
        {},
        {OWN: "0::/\n"},
        {OWN: "0::/\n", "memory.max": "max\n"},
        {OWN: "4:memory:/\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"},
    ],
)
def test_without_a_limit_it_is_the_machines(tmp_path: Path, files: dict[str, str]) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine_memory_gib(with_files(tmp_path, files)) == memory / GIB


def with_files(root: Path, files: dict[str, str]) -> Path:
    """A machine with these control groups."""
    for name, text in files.items():
        path = root / name if name == OWN else root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_vllm_says_of_memory_is_told_in_the_words_of_the_spec() -> None:
    said = f"{NOT_FREE} 0 (11.5/23.4 GiB) on kv cache allocation is less than requested memory for kv (20.0 GiB)."
    refusal = engines_refusal(said, kv_cache_gib=20.0, tokens=52)
    assert str(refusal).startswith("engines.kv_cache_gib=20 is more than the 11.5 of 23.4 GiB of memory that are free")
    assert engines_refusal("Unknown quantization method", kv_cache_gib=20.0, tokens=52) is None
    vllm = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    assert NOT_FREE in (vllm / "v1" / "worker" / "cpu_worker.py").read_text()


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.0123401, 0.0124), (1.0, 1.0), (12.01, 12.1), (0.00073242, 0.000733)]
)
def test_what_is_advised_is_never_too_little(number: float, rounded: float) -> None:
    assert rounded_up(number) == rounded


def test_a_text_with_a_special_token_would_end_nothing() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    turn = len(tokenizer) - 1
    check_stop_texts(["w3", "never seen", "<eos>"], tokenizer, None, [])
    check_stop_texts(["<turn>"], tokenizer, None, [turn])
    for text, remedy in {"<turn>": rf"set rollout.stop_token_ids=\[{turn}\] in", "w3 <turn>": "leave those"}.items():
        with pytest.raises(InputError, match=rf"stop has '{text}', .* end nothing: <turn> is special, .*; {remedy}"):
            check_stop_texts([text], tokenizer, None, [])
