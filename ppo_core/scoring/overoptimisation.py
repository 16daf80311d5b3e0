"""What shows that a policy pleases its reward and nobody else: scores that follow length, texts that repeat themselves.

All of it is measured on the responses of an iteration, over token ids without the token that ended them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ppo_core.records import RolloutRow, ScoreRow

REPETITION_N = 4
DISTINCT_NS = (1, 2)


def response_metrics(rollouts: Sequence[RolloutRow], scores: Sequence[ScoreRow]) -> dict[str, float]:
    """Length correlation, repetition and distinct-n of responses and their scores, row for row.

    What is not defined is left out: a correlation of scores or lengths that are all equal, distinct-n of answers that
    are all shorter than n.
    """
    texts = [row.response_token_ids[: len(row.response_token_ids) - row.finished] for row in rollouts]
    scored = [(len(row.response_token_ids), one.score) for row, one in zip(rollouts, scores, strict=True)]
    found = {
        "response/length_correlation": correlation([(length, score) for length, score in scored if score is not None]),
        "response/repetition": statistics.fmean(repetition(text) for text in texts),
        **{f"response/distinct_{n}": distinct(texts, n) for n in DISTINCT_NS},
    }
    return {name: value for name, value in found.items() if value is not None}


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's correlation of the pairs; None where one side is all equal, so that it has none.

    Source: Singhal et al. 2023, A Long Way to Go (arXiv:2310.03716), section 3, of rewards and lengths.

    >>> correlation([(1, 2.0), (2, 4.0), (3, 6.0)])
    1.0
    """
    try:
        return statistics.correlation([length for length, _ in pairs], [score for _, score in pairs])
    except statistics.StatisticsError:
        return None


def repetition(text: Sequence[int], n: int = REPETITION_N) -> float:
    """The share of a text's n-grams that it has said before: 1 - distinct n-grams / n-grams; 0 where there are none.

    Source: Welleck et al. 2020, Neural Text Generation with Unlikelihood Training (arXiv:1908.04319), seq-rep-n in
    section 6.1; like there the mean over texts is what is told.

    >>> repetition([1, 2, 1, 2, 1, 2, 1])  # 1212, 2121, 1212, 2121
    0.5
    """
    grams = list(zip(*(text[start:] for start in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """Distinct n-grams of all texts together over how many there are; 0 where all texts are empty and so alike, None
    where they have tokens but no n-grams. `n` is 1 or 2.

    It falls with the number of texts, so compare it between iterations of as many. Source: Li et al. 2016, A
    Diversity-Promoting Objective Function (arXiv:1510.03055), section 5.1; divided by n-grams, as has become usual.

    >>> distinct([[1, 2, 3], [1, 2, 4]], 2)  # 12, 23, 24 of 12, 23, 12, 24
    0.75
    """
    if not any(texts):
        return 0.0
    arrays = [np.asarray(text, dtype=np.int64) for text in texts]
    grams = np.concatenate([array if n == 1 else (array[:-1] << 32) + array[1:] for array in arrays])
    return len(np.unique(grams)) / len(grams) if len(grams) else None
