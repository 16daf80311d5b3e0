"""What is measured of responses against over-optimisation, beside values counted by hand and loops from the papers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.records import RolloutRow, ScoreRow
from ppo_core.scoring.overoptimisation import correlation, distinct, repetition, response_metrics

EOS = 2
TEXTS = st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), max_size=12), min_size=1, max_size=6)


def rollout(tokens: list[int], *, finished: bool = True) -> RolloutRow:
    reason = "stop" if finished else "length"
    return RolloutRow("p", 0, [1], [*tokens, *([EOS] * finished)], "", [], reason)


def scored(score: float | None) -> ScoreRow:
    return ScoreRow("p", 0, score, {"r": score}, False, None)


def grams(text: list[int], n: int) -> list[list[int]]:
    return [text[start : start + n] for start in range(len(text) - n + 1)]


@given(texts=TEXTS)
def test_repetition_and_distinct_are_those_of_the_papers(texts: list[list[int]]) -> None:
    for text in texts:
        found, seen = grams(text, 4), []
        for gram in found:
            seen += [] if gram in seen else [gram]
        assert repetition(text) == (pytest.approx(1 - len(seen) / len(found)) if found else 0.0)
    for n in (1, 2):
        every = [gram for text in texts for gram in grams(text, n)]
        of_none = None if any(texts) else 0.0
        expected = pytest.approx(len({tuple(gram) for gram in every}) / len(every)) if every else of_none
        assert distinct(texts, n) == expected


@given(pairs=st.lists(st.tuples(st.integers(1, 50), st.integers(-9, 9)), min_size=2, max_size=20))
def test_the_correlation_is_pearsons(pairs: list[tuple[int, int]]) -> None:
    lengths, scores = zip(*pairs, strict=True)
    mean_length, mean_score = sum(lengths) / len(pairs), sum(scores) / len(pairs)
    together = sum((x - mean_length) * (y - mean_score) for x, y in pairs)
    spread = math.sqrt(sum((x - mean_length) ** 2 for x in lengths) * sum((y - mean_score) ** 2 for y in scores))
    flat = len(set(lengths)) == 1 or len(set(scores)) == 1
    assert correlation(pairs) == (None if flat else pytest.approx(together / spread))


def test_what_ended_a_response_is_no_part_of_its_text_but_of_its_length() -> None:
    # Lengths 9, 4, 3 with scores 3, 1, and none: the third has no part in the correlation.
    rows = [rollout([5, 6] * 4), rollout([7, 8, 9]), rollout([7, 8, 9], finished=False)]
    assert response_metrics(rows, [scored(3.0), scored(1.0), scored(None)]) == {
        "response/length_correlation": 1.0,
        "response/repetition": pytest.approx((1 - 2 / 5) / 3),  # 5656, 6565, 5656, 6565, 5656; no 4-gram in the others
        "response/distinct_1": 5 / 14,
        "response/distinct_2": 4 / (7 + 2 + 2),
    }


def test_what_is_not_defined_is_no_metric() -> None:
    answers = [rollout([5]), rollout([6]), rollout([5])]
    assert response_metrics(answers, [scored(1.0)] * 3) == {
        "response/repetition": 0.0,
        "response/distinct_1": pytest.approx(2 / 3),
    }


def test_responses_that_say_nothing_are_all_alike() -> None:
    nothing = response_metrics([rollout([]), rollout([])], [scored(1.0), scored(2.0)])
    assert nothing == {"response/repetition": 0.0, "response/distinct_1": 0.0, "response/distinct_2": 0.0}
    assert response_metrics([rollout([5, 6]), rollout([])], [scored(1.0)] * 2)["response/distinct_2"] == 1.0
