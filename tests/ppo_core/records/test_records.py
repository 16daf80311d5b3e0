"""Rows, seeds and tables: their examples hold, and what is written is what is read."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies
from pyarrow import parquet

from ppo_core import sampling
from ppo_core.data import batches, shares
from ppo_core.data.batches import microbatches, minibatches
from ppo_core.data.tables import (
    check_aligned,
    count_prompts,
    longest_prompt,
    read_prompts,
    read_rollouts,
    read_scores,
    write_rollouts,
    write_scores,
)
from ppo_core.models import layout
from ppo_core.records import (
    InputError,
    PromptRow,
    RolloutRow,
    ScoreRow,
    canonical_json,
    content_digest,
    derive_seed,
    rows,
)
from tests.ppo_core.written_tables import write_prompts

CHAT = [{"role": "system", "content": "Kürzer."}, {"role": "user", "content": "7+5="}]
PROMPTS = [
    PromptRow("a", "7+5=", [10, 20], "2", {"level": 1, "tags": ["x", None]}),
    PromptRow("b", CHAT, [1], None, {}),
    PromptRow("c", "", [], "", {"nested": {"deep": [1.5]}}),
    PromptRow("d", "7+5=", [10, 20, 8], 12, {}),
    PromptRow("e", "sort", [1, 2], {"z": [1, None, "ü"], "a": False}, {}),
]
ROLLOUTS = [
    RolloutRow("a", 0, [10, 20], [8, 2], "2", [-0.5, -0.125], "stop"),
    RolloutRow("a", 1, [10, 20], [8, 8], "22", [-0.25, -1e-3], "length"),
]
SCORES = [
    ScoreRow("a", 0, 1.1, {"correct": 1.0, "format": 0.1}, False, None),
    ScoreRow("a", 1, None, {"correct": None, "format": 0.0}, True, "not scored by correct"),
]


@pytest.mark.parametrize(("module", "count"), [(rows, 4), (batches, 3), (sampling, 1), (shares, 1), (layout, 6)])
def test_the_examples_hold(module: ModuleType, count: int) -> None:
    assert doctest.testmod(module) == (0, count)


def test_prompts_survive_their_table(tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.parquet", PROMPTS)
    assert read_prompts(tmp_path / "train.parquet") == PROMPTS
    assert read_prompts(tmp_path / "train.parquet", rows=[3, 0]) == [PROMPTS[3], PROMPTS[0]]
    assert read_prompts(tmp_path / "train.parquet", named={"e", "b"}) == [PROMPTS[1], PROMPTS[4]]
    assert count_prompts(tmp_path / "train.parquet") == 5
    table = parquet.read_table(tmp_path / "train.parquet")
    assert table.column_names == [
        "prompt_id", "prompt", "messages", "prompt_token_ids", "reference_answer", "metadata",
    ]  # fmt: skip
    assert table["prompt"].to_pylist() == ["7+5=", None, "", "7+5=", "sort"]
    assert table["reference_answer"].to_pylist()[:4] == ['"2"', None, '""', "12"]
    assert longest_prompt(tmp_path / "train.parquet") == 3


def test_rollouts_survive_their_table_in_fp32(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.parquet", ROLLOUTS)
    read = read_rollouts(tmp_path / "rollouts.parquet")
    assert read[0] == ROLLOUTS[0]
    assert read[1].sampler_logprobs == pytest.approx(ROLLOUTS[1].sampler_logprobs, rel=1e-7)
    assert [row.finished for row in read] == [True, False]


def test_scores_survive_their_table_and_none_is_not_zero(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.parquet", SCORES)
    assert read_scores(tmp_path / "scores.parquet") == SCORES
    table = parquet.read_table(tmp_path / "scores.parquet")
    assert table.column_names == [
        "prompt_id", "sample_index", "score", "reward/correct", "reward/format", "truncated", "error",
    ]  # fmt: skip


def test_a_table_without_a_single_score_keeps_its_columns(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.parquet", SCORES[1:])
    assert read_scores(tmp_path / "scores.parquet") == SCORES[1:]


def test_scores_of_other_rollouts_are_refused() -> None:
    check_aligned(ROLLOUTS, SCORES)
    for scores in (SCORES[:1], SCORES[::-1], []):
        with pytest.raises(InputError, match=rf"scores \({len(scores)} rows\) are not those of these rollouts \(2"):
            check_aligned(ROLLOUTS, scores)


def test_canonical_json_is_one_text_per_value() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "ü"]}) == '{"a":[1.5,null,"\\u00fc"],"b":1}'
    # printf '{"a":1}' | sha256sum
    assert content_digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_seeds_are_the_first_63_bits_of_a_hash_of_their_parts() -> None:
    # printf '[0,"rollout",7]' | sha256sum begins with these 16 digits, whose last bit is dropped.
    assert derive_seed(0, "rollout", 7) == 0x3E274639A36F4E7F >> 1
    assert derive_seed() == 0x4F53CDA18C2BAA0C >> 1


def test_seeds_spread() -> None:
    seeds = {derive_seed(*parts) for parts in [(i, j) for i in range(60) for j in range(60)]}
    seeds |= {derive_seed(12), derive_seed("12"), derive_seed("1", "2"), derive_seed("1,2"), derive_seed(21)}
    assert len(seeds) == 3605
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert ones == pytest.approx(0.5, abs=0.05), f"bit {bit}: 6 standard deviations are 0.05"


def test_minibatches_have_every_row_once_in_an_order_of_their_own() -> None:
    parts = minibatches(12, 4, 0, "update", 0)
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    assert sorted(row for part in parts for row in part) == list(range(12))
    assert parts == minibatches(12, 4, 0, "update", 0)
    assert parts != minibatches(12, 4, 0, "update", 1)


def test_microbatches_keep_every_row_and_the_size() -> None:
    parts = microbatches([5, 0, 3, 1, 4], [7, 7, 0, 2, 2, 9], tokens=100, size=2)
    assert parts == [[[3, 4], [5], [0, 1]]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(data=strategies.data())
def test_microbatches_are_within_limits_and_as_many_on_every_rank(data: Any, ranks: int, *, padded: bool) -> None:
    lengths = data.draw(strategies.lists(strategies.integers(1, 30), min_size=ranks, max_size=24))
    rows = data.draw(strategies.permutations(range(len(lengths))))
    tokens, size = data.draw(strategies.integers(10, 80)), data.draw(strategies.none() | strategies.integers(1, 5))
    shares = microbatches(rows, lengths, tokens=tokens, size=size, ranks=ranks, padded=padded)

    parts = [part for share in shares for part in share]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        cost = max(lengths[row] for row in part) * len(part) if padded else sum(lengths[row] for row in part)
        assert cost <= max(tokens, max(lengths))
        assert size is None or len(part) <= size
    if len(lengths) >= ranks * max(len(share) for share in shares):
        assert len({len(share) for share in shares}) == 1


def test_ranks_get_as_many_tokens() -> None:
    lengths = [*range(10, 74)]
    shares = microbatches(range(64), lengths, tokens=400, ranks=4)
    loads = [sum(lengths[row] for part in share for row in part) for share in shares]
    assert max(loads) < 1.1 * min(loads)
