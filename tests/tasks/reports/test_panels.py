"""The panels of the learning curves that are no plain curves."""

from __future__ import annotations

from tasks.reports.mlflow import frontier, panels


def test_the_frontier_has_each_reward_over_the_kl_of_its_iteration() -> None:
    first = {"kl/reference": 0.0, "score/mean": 1.0, "score/std": 9.0, "score/learned": 1.0, "score/gold": 0.5}
    second = {"kl/reference": 2.0, "score/mean": 3.0, "score/unscored": 0.0, "score/learned": 3.0, "score/gold": 0.25}
    (panel,) = frontier({0: {"evaluation/score": 7.0}, 2: second, 1: first})
    assert panel.lines == {
        "score/mean": [(0.0, 1.0), (2.0, 3.0)],
        "score/gold": [(0.0, 0.5), (2.0, 0.25)],
        "score/learned": [(0.0, 1.0), (2.0, 3.0)],
    }
    assert panel in panels({0: {}, 1: first, 2: second})


def test_a_single_reward_is_drawn_once_and_nothing_not_at_all() -> None:
    counts = {"score/ahead": 250.0, "score/positions": 3.0, "score/prompts_with_signal": 12.0}
    (panel,) = frontier({1: {"kl/reference": 0.5, "score/mean": 1.0, "score/correct": 1.0, **counts}})
    assert panel.lines == {"score/mean": [(0.5, 1.0)]}
    assert frontier({0: {"evaluation/score": 7.0}}) == []
