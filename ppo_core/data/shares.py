"""How several sources of prompts share the draws."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Share(NamedTuple):
    """One of several sources: its rows, which follow those of the source before, and its draws in an epoch."""

    rows: int
    draws: int


def shares_of(rows: Sequence[int], weights: Sequence[float]) -> list[Share]:
    """Sources of so many rows with such weights, in epochs of as many draws as there are rows (largest remainders).

    >>> shares_of([6, 3], [1.0, 2.0])
    [Share(rows=6, draws=3), Share(rows=3, draws=6)]
    """
    total, whole = sum(rows), sum(map(Fraction, weights))
    wanted = [total * Fraction(weight) / whole for weight in weights]
    draws = [int(part) for part in wanted]
    by_remainder = sorted(range(len(rows)), key=lambda number: (draws[number] - wanted[number], number))
    for number in by_remainder[: total - sum(draws)]:
        draws[number] += 1
    return [Share(count, drawn) for count, drawn in zip(rows, draws, strict=True)]
