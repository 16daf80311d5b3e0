"""The reward `model`: a reward model of the user's reads prompt and response, in the scoring engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_core.records import PromptRow
from ppo_core.scoring.functions import checked_scores
from ppo_core.scoring.plugins import Sources
from ppo_core.scoring.reward import NotScored, Progress, Sample, Score
from ppo_core.spec.reward.kinds import ModelRewardSpec

if TYPE_CHECKING:
    from ppo_core.models.classifier import Classifier


class ModelReward:
    """Loaded when it is first asked, and kept for the next job."""

    def __init__(self, spec: ModelRewardSpec, sources: Sources, progress: Progress) -> None:
        self.spec = spec
        self.sources = sources
        self.progress = progress

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do: the trial of the first rows says what the model cannot read."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """A text that is longer than the model's context has no score."""
        model = self._model()
        sequences = [model.tokens(one.row.prompt, one.response) for one in samples]
        limit = model.context
        fits = [row for row, sequence in enumerate(sequences) if 0 < len(sequence) <= (limit or len(sequence))]
        label = f"scores of {self.spec.component}"
        scored = model.scores(
            [sequences[row] for row in fits],
            self.spec.microbatch_tokens,
            lambda done: self.progress(done, len(fits), label),
        )
        scores: list[Score] = [
            NotScored(f"{len(sequence)} tokens, but the reward model reads 1 to {limit}") for sequence in sequences
        ]
        checked = checked_scores(self.spec.label, scored, [samples[row] for row in fits])
        for row, score in zip(fits, checked, strict=True):
            scores[row] = score
        return scores

    def _model(self) -> Classifier:
        sources = self.sources
        folder, trusted = sources.place(self.spec.path), sources.trust_remote_code
        return _loaded(folder, sources.digest, dtype=self.spec.dtype, trust_remote_code=trusted)


@lru_cache(maxsize=4)
def _loaded(folder: Path, digest: str, *, dtype: str, trust_remote_code: bool) -> Classifier:
    """`digest` tells whether the files of the folder are those that were read."""
    from ppo_core.models.classifier import Classifier  # torch: seconds

    return Classifier(folder, dtype=dtype, trust_remote_code=trust_remote_code)
