"""Rows into minibatches and microbatches: which sequences are worked on together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppo_core.records import TokenSequence, derive_seed


def permutation(count: int, *parts: int | str) -> list[int]:
    """A seeded order of 0..count-1, the same on every machine."""
    generator = torch.Generator().manual_seed(derive_seed(*parts))
    return torch.randperm(count, generator=generator).tolist()


def minibatches(count: int, num_minibatches: int, *parts: int | str) -> list[list[int]]:
    """All rows once, in seeded order, in `num_minibatches` equal parts.

    >>> sorted(sum(minibatches(6, 3, 0, "update"), []))
    [0, 1, 2, 3, 4, 5]
    """
    order, size = permutation(count, *parts), count // num_minibatches
    return [order[start : start + size] for start in range(0, count, size)]


def microbatches(rows: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows cut into parts of at most `size`, neighbours in length together: less padding, the same sums.

    >>> microbatches([0, 1, 2, 3], [9, 2, 8, 3], 2)
    [[1, 3], [2, 0]]
    """
    ordered = sorted(rows, key=lambda row: (lengths[row], row))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def lengths_of(sequences: Sequence[TokenSequence]) -> list[int]:
    """Tokens of each prompt with its response."""
    return [len(prompt) + len(response) for prompt, response in sequences]
