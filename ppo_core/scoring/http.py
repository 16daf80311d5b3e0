"""The reward `http`: a server of the user's scores batches of samples.

    POST url    {"samples": [{"prompt", "response", "token_ids", "reference_answer", "metadata"}, ...]}
    200         {"scores": [0.5, null, ...]}

One number for each sample, in their order, or a list of its parts (`spans.py`); null where a sample has no score. In
place of each may stand {"score": 0.5, "format": 1.0, ...}: the other numbers are measured, and count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppo_core.records import InputError, PromptRow
from ppo_core.scoring.endpoint import Endpoint
from ppo_core.scoring.functions import with_measures
from ppo_core.scoring.reward import NotScored, Progress, Sample, Score, shorten
from ppo_core.scoring.signatures import VERL_BATCH, measures_in, scores_in
from ppo_core.scoring.spans import checked_scores
from ppo_core.spec.reward.kinds import HttpRewardSpec


class HttpReward:
    """Batches in flight side by side."""

    def __init__(self, spec: HttpRewardSpec, progress: Progress) -> None:
        self.spec = spec
        self.endpoint = Endpoint(spec, spec.url, progress)

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """The server gets all columns, and knows itself what it needs."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """A batch whose request fails for good has no scores, but of what the server refuses each sample is asked for
        alone: it may be for one of them, and which ones share a batch depends on who comes first."""
        scores = self._asked(samples, self.spec.batch_size)
        refused = [number for number, score in enumerate(scores) if isinstance(score, NotScored) and score.refused]
        if refused and self.spec.batch_size > 1:
            before, self.endpoint.answered = self.endpoint.answered, self.endpoint.answered + len(scores) - len(refused)
            for number, score in zip(refused, self._asked([samples[number] for number in refused], 1), strict=True):
                scores[number] = score
            self.endpoint.answered = before
        return scores

    def go_on(self, answered: int, scored: Sample | None) -> None:
        """Where it gave scores before, a few samples without an answer do not mean that the server is down."""
        self.endpoint.answered = answered
        self.endpoint.known = None if scored is None else self.body_of([scored])

    def _asked(self, samples: Sequence[Sample], size: int) -> list[Score]:
        """In batches of that size."""
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        bodies = [self.body_of(batch) for batch in batches]
        answers = self.endpoint.ask(bodies, lambda index, answer: self._scores(answer, batches[index]))
        scores: list[Score] = []
        for batch, answer in zip(batches, answers, strict=True):
            scores += [answer] * len(batch) if isinstance(answer, NotScored) else answer
        return scores

    def body_of(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The request for these."""
        return {"samples": [as_document(sample) for sample in samples]}

    def _scores(self, answer: Any, samples: Sequence[Sample]) -> list[Score]:
        if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
            raise InputError(
                f"{self.spec.url} (the reward {self.spec.component}) answered {shorten(answer)}: it must answer an "
                'object with the list "scores", as in {"scores": [0.5, null]}'
            )
        given, whose = answer["scores"], f"{self.spec.url} (the reward {self.spec.component})"
        scores = scores_in(whose, VERL_BATCH, given)
        for index, value in enumerate(scores):
            if _has_truth(value):
                raise InputError(
                    f"{whose}: score {index} is {shorten(value)}: true and false are no scores: answer numbers, as in "
                    '{"scores": [1.0, 0.0]}, or null'
                )
        checked = checked_scores(whose, scores, samples)
        return with_measures(checked, measures_in(whose, VERL_BATCH, given, len(samples)))


def _has_truth(value: Any) -> bool:
    """Whether a score, or a part of it, is true or false."""
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part.get("score") if isinstance(part, dict) else part, bool) for part in parts)


def as_document(sample: Sample) -> dict[str, Any]:
    """What the server sees of a sample."""
    return {
        "prompt": sample.row.prompt,
        "response": sample.response,
        "token_ids": None if sample.token_ids is None else list(sample.token_ids),
        "reference_answer": sample.row.reference_answer,
        "metadata": sample.row.metadata,
    }
