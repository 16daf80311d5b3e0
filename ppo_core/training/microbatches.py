"""Which microbatches a rank works on, and which of its threads."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_core.data.batches import MICROBATCH_TOKENS, microbatches
from ppo_core.processes.ranks import Ranks
from ppo_core.spec import TrainingSpec


def share_of(
    ranks: Ranks,
    rows: Sequence[int],
    lengths: Sequence[int],
    training: TrainingSpec,
    threads: int = 1,
    *,
    padded: bool,
) -> list[list[list[int]]]:
    """This rank's microbatches of the rows, for each of its threads; together the ranks have all of them.

    Threads share the room of a microbatch, so there are fewer where it has no room for a row of each.
    """
    tokens, size = training.microbatch_tokens or MICROBATCH_TOKENS, training.microbatch_size
    threads = max(1, min(threads, size or threads, tokens // max((lengths[row] for row in rows), default=1)))
    tokens, size = tokens // threads, size and size // threads
    shares = microbatches(rows, lengths, tokens=tokens, size=size, ranks=ranks.world_size * threads, padded=padded)
    # Every rank's first thread before any rank's second: ranks wait for each other, so each needs rows.
    return shares[ranks.rank :: ranks.world_size]
