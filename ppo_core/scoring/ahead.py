"""What rewards said of responses while others were still sampled, kept until the job that scores all of them.

    score_ahead     some samples ─► the reward ─► remembered
    score_rollouts  all samples  ─► those remembered, and the reward for the rest

Both jobs together ask for each sample once, but for those without a score: the first tries those once, the second as
often as the spec says. Scores are those that the second would have got alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ppo_core.records import InputError, PromptRow, content_digest
from ppo_core.scoring.reward import GoesOn, NotScored, Reward, RewardFailed, Sample, Score, plain

MOST_SCORES = 2**17
"""Beyond that the oldest are forgotten; one takes about 200 bytes."""


class ScoresAhead:
    """Scores by what they are of: the reward, its code, and a sample. What has no score is not remembered: it is asked
    for again. A new process remembers nothing."""

    def __init__(self, most: int = MOST_SCORES) -> None:
        self._most = most
        self._scores: dict[str, Score] = {}
        self._given: Counter[str] = Counter()
        self._used: set[str] = set()
        self._dataset = ""

    def for_dataset(self, digest: str) -> ScoresAhead:
        """The same; what was said of another dataset's rows is forgotten."""
        if digest != self._dataset:
            self._dataset, self._scores = digest, {}
            self.forget_used()
        return self

    def of(self, keys: Sequence[str]) -> list[Score]:
        """The scores under these keys, None where there is none."""
        return [self._scores.get(key) for key in keys]

    def use(self, keys: Sequence[str]) -> list[Score]:
        """The same, for good: they can be forgotten then."""
        self._used.update(key for key in keys if key in self._scores)
        return self.of(keys)

    def keep(self, reward: str, keys: Sequence[str], scores: Sequence[Score]) -> None:
        """Remember those that are scores."""
        for key, score in zip(keys, scores, strict=True):
            if not isinstance(plain(score), NotScored | None):
                self._scores[key] = score
                self._given[reward] += 1
        while len(self._scores) > self._most:
            del self._scores[next(iter(self._scores))]

    def given(self, reward: str) -> int:
        """How many scores a reward gave since the last time that any were forgotten."""
        return self._given[reward]

    def forget_used(self) -> None:
        """What was used is written down: a sample that comes again with the same response is scored again."""
        for key in self._used:
            self._scores.pop(key, None)
        self._used.clear()
        self._given.clear()


@dataclass(frozen=True)
class RememberedReward:
    """A reward that is asked only for samples of which nothing is remembered; `name` says which it is, and its code."""

    reward: Reward
    name: str
    ahead: ScoresAhead

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """As the reward does."""
        self.reward.check_rows(rows, first)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """As the reward does."""
        known = self.ahead.use([self._key(sample) for sample in samples])
        rest = [sample for sample, score in zip(samples, known, strict=True) if score is None]
        scored = next((sample for sample, score in zip(samples, known, strict=True) if score is not None), None)
        said = iter(self._ask(rest, scored, answered=len(samples) - len(rest)))
        return [next(said) if score is None else score for score in known]

    def score_ahead(self, samples: Sequence[Sample]) -> list[bool]:
        """Have it score those of which nothing is remembered, and remember that; whether each has a score now."""
        keys = [self._key(sample) for sample in samples]
        known = self.ahead.of(keys)
        rest = [number for number, score in enumerate(known) if score is None]
        scored = next((sample for sample, score in zip(samples, known, strict=True) if score is not None), None)
        try:
            said = self._ask([samples[number] for number in rest], scored, answered=self.ahead.given(self.name))
        except (RewardFailed, InputError) as error:  # with all samples at hand it may be otherwise
            print(f"not scored while others are sampled: {error}", file=sys.stderr)
            said = [None] * len(rest)
        self.ahead.keep(self.name, [keys[number] for number in rest], said)
        return [score is not None for score in self.ahead.of(keys)]

    def _ask(self, samples: Sequence[Sample], scored: Sample | None, *, answered: int) -> Sequence[Score]:
        """`answered` says how many it scored before; `scored` is one of them, if one is at hand."""
        if not samples:
            return []
        if isinstance(self.reward, GoesOn):
            self.reward.go_on(answered, scored)
        return self.reward.score(samples)

    def _key(self, sample: Sample) -> str:
        tokens = list(sample.token_ids or ())
        return content_digest([self.name, sample.row.prompt_id, sample.sample_index, sample.response, tokens])
