"""Rows into minibatches and microbatches: which sequences are worked on together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppo_core.records import TokenSequence, derive_seed

MICROBATCH_TOKENS = 4096
"""Of a backward pass, where a spec does not say."""


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


def microbatches(
    rows: Sequence[int],
    lengths: Sequence[int],
    *,
    tokens: int,
    size: int | None = None,
    ranks: int = 1,
    padded: bool = False,
) -> list[list[list[int]]]:
    """For each rank its microbatches: as few as hold at most `size` rows and `tokens` tokens each, of equal cost.

    The limit of tokens is at least the longest row. Rows of neighbouring lengths are together. All ranks get as many
    microbatches, as collective calls in them need, if there are rows enough. A row costs its tokens, `padded` those of
    the longest beside it.

    >>> microbatches([0, 1, 2, 3], [9, 2, 8, 3], tokens=12)
    [[[1, 3], [2], [0]]]
    >>> microbatches([0, 1, 2, 3], [9, 2, 8, 3], tokens=12, ranks=2)
    [[[3], [2]], [[1], [0]]]
    """
    if not rows:
        return [[] for _ in range(ranks)]
    ordered = sorted(rows, key=lambda row: (lengths[row], row))
    limit = max(tokens, lengths[ordered[-1]])
    count = ranks * -(-len(_cut(ordered, lengths, limit, size, padded=padded)) // ranks)
    low, high = lengths[ordered[-1]], limit
    while low < high:  # the lowest limit that needs no more parts
        middle = (low + high) // 2
        enough = len(_cut(ordered, lengths, middle, size, padded=padded)) <= count
        low, high = (low, middle) if enough else (middle + 1, high)
    parts = _cut(ordered, lengths, high, size, padded=padded)
    while len(parts) < count and max(map(len, parts)) > 1:
        widest = max(range(len(parts)), key=lambda index: (len(parts[index]), -index))
        part = parts[widest]
        parts[widest : widest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    parts.sort(key=lambda part: _cost(part, lengths, padded=padded))
    rounds = [parts[start : start + ranks] for start in range(0, len(parts), ranks)]
    for dealt in rounds[::2]:  # every second one backwards, else the last rank would get the largest of each
        if len(dealt) == ranks:
            dealt.reverse()
    return [[dealt[rank] for dealt in rounds if rank < len(dealt)] for rank in range(ranks)]


def _cost(rows: Sequence[int], lengths: Sequence[int], *, padded: bool) -> int:
    return lengths[rows[-1]] * len(rows) if padded else sum(lengths[row] for row in rows)


def _cut(
    ordered: Sequence[int], lengths: Sequence[int], limit: int, size: int | None, *, padded: bool
) -> list[list[int]]:
    """Rows of ascending length, cut wherever a part would pass the limit."""
    parts, total = [[ordered[0]]], lengths[ordered[0]]
    for row in ordered[1:]:
        part, length = parts[-1], lengths[row]
        total = length * (len(part) + 1) if padded else total + length
        if total > limit or len(part) == size:
            parts.append([row])
            total = length
        else:
            part.append(row)
    return parts


def lengths_of(sequences: Sequence[TokenSequence]) -> list[int]:
    """Tokens of each prompt with its response."""
    return [len(prompt) + len(response) for prompt, response in sequences]
