"""Which prompts an iteration samples, and with which seeds: pure functions of the run's seed and the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ppo_core.data.batches import permutation
from ppo_core.data.shares import Share
from ppo_core.records import derive_seed


@dataclass(frozen=True)
class Draw:
    """One response to sample: the dataset's row, which sample of its prompt, and the seed of the request."""

    row: int
    sample_index: int
    seed: int


@dataclass(frozen=True)
class EasyFirst:
    """The first `prompts` of the stream come with the smallest `difficulty`, a number per row, first in each epoch."""

    difficulty: Sequence[float]
    prompts: int


def draw_prompts(
    num_rows: int,
    position: int,
    count: int,
    *,
    seed: int,
    shuffle: bool,
    shares: Sequence[Share] = (),
    easy_first: EasyFirst | None = None,
) -> list[int]:
    """Row numbers at `position`, `position + 1`, ... of an endless stream of epochs, each in its own seeded order.

    With `shares` an epoch has of each source its draws, from an endless stream of the source's own. `easy_first`
    changes the order alone: which rows are among the first `prompts`, and how often, it does not.
    The data cursor is this one number, whatever the number of ranks or engines:

    >>> draw_prompts(3, 2, 3, seed=0, shuffle=False)
    [2, 0, 1]
    """
    rows: list[int] = []
    while len(rows) < count:
        epoch, start = divmod(position + len(rows), num_rows)
        order = permutation(num_rows, seed, "epoch", epoch) if shuffle else list(range(num_rows))
        if shares:
            mixed = _mixed(shares, epoch, seed=seed, shuffle=shuffle)
            order = [mixed[place] for place in order]
        if easy_first is not None:
            sorted_ones = min(max(easy_first.prompts - epoch * num_rows, 0), num_rows)
            order[:sorted_ones] = sorted(order[:sorted_ones], key=easy_first.difficulty.__getitem__)
        rows += order[start : start + count - len(rows)]
    return rows


def _mixed(shares: Sequence[Share], epoch: int, *, seed: int, shuffle: bool) -> list[int]:
    """The rows of one epoch, each source's spread evenly over it."""
    placed, first = [], 0
    for number, share in enumerate(shares):
        own = derive_seed(seed, "source", number)
        drawn = draw_prompts(share.rows, epoch * share.draws, share.draws, seed=own, shuffle=shuffle)
        placed.append([((place + 0.5) / share.draws, first + row) for place, row in enumerate(drawn)])
        first += share.rows
    return [row for _, row in sorted(chain.from_iterable(placed), key=lambda item: item[0])]


def draws(
    rows: list[int],
    prompt_ids: Sequence[str] | Mapping[int, str],
    samples_per_prompt: int,
    *,
    seed: int,
    stream: int | str,
) -> list[Draw]:
    """One draw per (prompt, sample). `stream` is the iteration, or a name where no iteration is meant.

    The place in the list is part of the seed only for a prompt that comes twice in one iteration.
    """
    seen: dict[int, int] = {}
    result = []
    for row in rows:
        first = seen.get(row, 0)
        for sample in range(first, first + samples_per_prompt):
            result.append(Draw(row, sample, derive_seed(seed, stream, prompt_ids[row], sample)))
        seen[row] = first + samples_per_prompt
    return result
