from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core.data.shares import Share, shares_of
from ppo_core.sampling import Draw, EasyFirst, draw_prompts, draws

COUNTS = st.integers(1, 12)
SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=40, deadline=None)
@given(rows=COUNTS, epochs=st.integers(1, 4), seed=SEEDS, shuffle=st.booleans())
def test_every_epoch_has_every_row_once(rows: int, epochs: int, seed: int, shuffle: bool) -> None:
    stream = draw_prompts(rows, 0, rows * epochs, seed=seed, shuffle=shuffle)
    for epoch in range(epochs):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@settings(max_examples=40, deadline=None)
@given(rows=COUNTS, counts=st.lists(st.integers(0, 30), max_size=6), seed=SEEDS)
def test_the_position_alone_says_where_the_stream_goes_on(rows: int, counts: list[int], seed: int) -> None:
    whole = draw_prompts(rows, 0, sum(counts), seed=seed, shuffle=True)
    parts, position = [], 0
    for count in counts:
        parts += draw_prompts(rows, position, count, seed=seed, shuffle=True)
        position += count
    assert parts == whole


def test_without_shuffle_the_file_order_repeats() -> None:
    assert draw_prompts(3, 0, 7, seed=0, shuffle=False) == [0, 1, 2, 0, 1, 2, 0]
    assert draw_prompts(3, 5, 2, seed=9, shuffle=False) == [2, 0]
    assert draw_prompts(3, 3_000_001, 2, seed=9, shuffle=False) == [1, 2]


@settings(max_examples=60, deadline=None)
@given(
    difficulty=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=12),
    counts=st.lists(st.integers(0, 30), max_size=6),
    prompts=st.integers(1, 40),
    seed=SEEDS,
)
def test_easy_prompts_come_first_and_none_more_often(
    difficulty: list[float], counts: list[int], prompts: int, seed: int
) -> None:
    """Each epoch's part of the first prompts is sorted, of equals as drawn; what follows is as without."""
    rows, total = len(difficulty), sum(counts)
    usual = draw_prompts(rows, 0, max(total, prompts), seed=seed, shuffle=True)
    expected: list[int] = []
    for first in range(0, prompts, rows):
        part = usual[first : min(first + rows, prompts)]
        expected += [row for level in sorted(set(difficulty)) for row in part if difficulty[row] == level]
    expected += usual[prompts:]
    found: list[int] = []
    for count in counts:
        easy_first = EasyFirst(difficulty, prompts)
        found += draw_prompts(rows, len(found), count, seed=seed, shuffle=True, easy_first=easy_first)
    assert found == expected[:total]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.integers(1, 9), min_size=2, max_size=4), data=st.data(), seed=SEEDS, shuffle=st.booleans())
def test_every_epoch_has_of_each_source_its_draws_and_each_row_as_often_as_any_other(
    rows: list[int], data: st.DataObject, seed: int, shuffle: bool
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10.0), min_size=len(rows), max_size=len(rows)))
    shares, total = shares_of(rows, weights), sum(rows)
    assert sum(share.draws for share in shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share.draws - total * weight / sum(weights)) < 1
    stream = draw_prompts(total, 0, 12 * total, seed=seed, shuffle=shuffle, shares=shares)
    first = 0
    for share in shares:
        own = range(first, first + share.rows)
        first += share.rows
        for epoch in range(12):
            drawn = [row for row in stream[epoch * total : (epoch + 1) * total] if row in own]
            assert len(drawn) == share.draws
        counts = Counter(row for row in stream if row in own)
        assert not counts or max(counts.values()) - min(counts[row] for row in own) <= 1


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 30), max_size=6), seed=SEEDS, shuffle=st.booleans())
def test_sources_go_on_at_the_position_too(counts: list[int], seed: int, shuffle: bool) -> None:
    shares = [Share(5, 2), Share(2, 5)]
    whole = draw_prompts(7, 0, sum(counts), seed=seed, shuffle=shuffle, shares=shares)
    parts: list[int] = []
    for count in counts:
        parts += draw_prompts(7, len(parts), count, seed=seed, shuffle=shuffle, shares=shares)
    assert parts == whole


def test_without_shuffle_sources_are_spread_evenly_and_each_goes_on_where_it_was() -> None:
    shares = [Share(4, 2), Share(2, 4)]
    drawn = draw_prompts(6, 0, 12, seed=0, shuffle=False, shares=shares)
    assert drawn == [4, 0, 5, 4, 1, 5, 4, 2, 5, 4, 3, 5]
    assert draw_prompts(6, 0, 6, seed=0, shuffle=True, shares=shares) != drawn[:6]


def test_orders_differ_from_epoch_to_epoch_and_from_seed_to_seed() -> None:
    epochs = [tuple(draw_prompts(20, 20 * n, 20, seed=seed, shuffle=True)) for seed in range(3) for n in range(3)]
    assert len(set(epochs)) == 9
    assert epochs[0] != tuple(range(20))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=12), samples=st.integers(1, 4), seed=SEEDS)
def test_no_two_draws_share_a_seed(rows: list[int], samples: int, seed: int) -> None:
    names = [f"p{number}" for number in range(6)]
    drawn = [draw for stream in (0, 1, "evaluation") for draw in draws(rows, names, samples, seed=seed, stream=stream)]
    assert len({draw.seed for draw in drawn}) == len(drawn) == 3 * len(rows) * samples
    assert all(0 <= draw.seed < 2**63 for draw in drawn)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=12), samples=st.integers(1, 4))
def test_samples_of_a_prompt_are_numbered_through(rows: list[int], samples: int) -> None:
    drawn = draws(rows, [f"p{number}" for number in range(6)], samples, seed=0, stream=0)
    assert [draw.row for draw in drawn] == [row for row in rows for _ in range(samples)]
    for row, times in Counter(rows).items():
        assert [draw.sample_index for draw in drawn if draw.row == row] == list(range(times * samples))


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(6)), count=st.integers(1, 6), samples=st.integers(1, 3))
def test_a_seed_depends_on_neither_order_nor_company(order: list[int], count: int, samples: int) -> None:
    names = [f"p{number}" for number in range(6)]
    everything = {(d.row, d.sample_index): d.seed for d in draws(list(range(6)), names, 3, seed=1, stream=2)}
    for draw in draws(order[:count], names, samples, seed=1, stream=2):
        assert draw.seed == everything[draw.row, draw.sample_index]


@pytest.mark.parametrize("change", [{"seed": 2}, {"stream": 3}, {"stream": "2"}])
def test_another_run_or_iteration_has_other_seeds(change: dict[str, int | str]) -> None:
    def seeds(**asked: int | str) -> set[int]:
        given = {"seed": 1, "stream": 2, **asked}
        return {d.seed for d in draws([0, 1], ["a", "b"], 4, seed=int(given["seed"]), stream=given["stream"])}

    assert not seeds() & seeds(**change)


def test_a_seed_follows_the_prompt_not_its_row() -> None:
    (here,) = draws([0], ["a", "b"], 1, seed=1, stream=2)
    (there,) = draws([1], ["b", "a"], 1, seed=1, stream=2)
    assert (here, there) == (Draw(0, 0, here.seed), Draw(1, 0, here.seed))
