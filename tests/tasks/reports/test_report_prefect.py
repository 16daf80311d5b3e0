"""The table of iterations as Prefect's page has it."""

from __future__ import annotations

import math

from tasks.reports.prefect import iteration_rows


def test_the_columns_that_people_look_for_come_first_and_every_row_has_all() -> None:
    start = {"evaluation/accuracy": 0.25, "a/b": 1.0, "seconds/iteration": 30.0}
    first = {"seconds/iteration": 2.00004, "score/mean": 0.5, "kl/reference": math.inf}
    rows = iteration_rows({1: first, 0: start})
    columns = ["iteration", "score/mean", "evaluation/accuracy", "kl/reference", "seconds/iteration", "a/b"]
    assert [list(row) for row in rows] == [columns, columns]
    assert list(rows[0].values()) == [0, None, 0.25, None, 30.0, 1.0]
    assert list(rows[1].values()) == [1, 0.5, None, None, 2.0, None]
