"""Preference pairs out of scored samples: of each prompt the best response against the worst, as `preferences` reads.

Where the policy's own start gave the samples, they are what DPO asks for: pairs of what it says itself, judged by the
reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ppo_core.data.tables import check_aligned
from ppo_core.records import Messages, PromptRow, RolloutRow, ScoreRow


class Sample(NamedTuple):
    """A response and its score; `finished` unless the length limit cut it."""

    text: str
    score: float
    finished: bool


@dataclass
class SampledPairs:
    """Counts of what pairs were looked for in: prompts, each once for every iteration that drew it.

    `alone` have less than two responses with a score, in those of `cut` only responses that the length limit cut are
    better than another, and in the rest of those without a pair, `alike`, none is better. `unscored` are responses.
    """

    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("prompts", "pairs", "alone", "alike", "cut", "unscored"), 0)
    )

    def rows(
        self, prompts: Mapping[str, PromptRow], rollouts: Sequence[RolloutRow], scores: Sequence[ScoreRow]
    ) -> Iterable[dict[str, Any]]:
        """The pairs of one iteration, in the order of its prompts."""
        check_aligned(rollouts, scores)
        groups: dict[str, list[Sample]] = {}
        for rollout, score in zip(rollouts, scores, strict=True):
            group = groups.setdefault(rollout.prompt_id, [])
            if score.score is None:
                self.counts["unscored"] += 1
            else:
                group.append(Sample(rollout.response, score.score, rollout.finished))
        for name, samples in groups.items():
            found = best_and_worst(samples)
            self.counts["prompts"] += 1
            self.counts["pairs" if isinstance(found, tuple) else found] += 1
            if isinstance(found, tuple):
                yield row_of(prompts[name].prompt, *found)


def best_and_worst(samples: Sequence[Sample]) -> tuple[str, str] | str:
    """The texts of the pair, or why there is none; of equal scores the first counts.

    A response that the length limit cut is never the better one: it would be learned with an end that it has not.

    >>> best_and_worst([Sample("a", 0.0, True), Sample("b", 1.0, True), Sample("c", 1.0, True)])
    ('b', 'a')
    >>> best_and_worst([Sample("a", 1.0, True), Sample("b", 1.0, True)])
    'alike'
    >>> best_and_worst([Sample("a", 0.0, True), Sample("b", 1.0, False)])
    'cut'
    """
    if len(samples) < 2:
        return "alone"
    best = max((sample for sample in samples if sample.finished), key=score_of, default=None)
    # A reward that depends on more than the text may give one text two scores: it is no pair with itself.
    worst = min((sample for sample in samples if best is None or sample.text != best.text), key=score_of, default=None)
    if best is not None and worst is not None and worst.score < best.score:
        return best.text, worst.text
    return "alike" if len(set(map(score_of, samples))) == 1 or best == max(samples, key=score_of) else "cut"


def score_of(sample: Sample) -> float:
    """Of a response."""
    return sample.score


def row_of(prompt: str | Messages, chosen: str, rejected: str) -> dict[str, Any]:
    """As texts, or where the prompt is messages, each response as the message that follows them."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    said = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    return {"prompt": prompt, **dict(zip(("chosen", "rejected"), said, strict=True))}
