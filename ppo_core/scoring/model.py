"""The reward `model`: a reward model of the user's reads prompt and response, in the scoring engine or below it."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_core.processes.plugins import Sources
from ppo_core.records import PromptRow
from ppo_core.scoring.held_models import RewardModel, held_models
from ppo_core.scoring.reward import NotScored, Progress, Sample, Score
from ppo_core.scoring.spans import checked_scores
from ppo_core.spec.reward.kinds import ModelRewardSpec


class ModelReward:
    """Loaded when it is first asked, and kept for the next job. Raises InputError where it asks for a GPU in vain."""

    def __init__(self, spec: ModelRewardSpec, sources: Sources, progress: Progress) -> None:
        self.spec = spec
        self.sources = sources
        self.progress = progress
        if spec.device == "cuda":
            from ppo_core.models.classifier import require_device  # torch: seconds

            require_device(spec.device, f"the device of the reward {spec.component}")

    def check_rows(self, rows: Sequence[PromptRow], first: int = 1) -> None:
        """Any row will do: the trial of the first rows says what the model cannot read."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """A text that is longer than the model's context has no score, nor one whose score is not finite."""
        loading = f"loading the reward model {self.spec.component}"
        model = held_models().of(self.spec, self.sources, lambda _: self.progress(0, 0, loading))
        sequences = [model.tokens(one.row.prompt, one.response) for one in samples]
        limit = model.context
        fits = [row for row, sequence in enumerate(sequences) if 0 < len(sequence) <= (limit or len(sequence))]
        scored = self._scored(model, [sequences[row] for row in fits])
        scores: list[Score] = [
            NotScored(f"{len(sequence)} tokens, but the reward model reads 1 to {limit}") for sequence in sequences
        ]
        checked = checked_scores(self.spec.label, scored, [samples[row] for row in fits], one_by_one=True)
        for row, score in zip(fits, checked, strict=True):
            scores[row] = score
        return scores

    def _scored(self, model: RewardModel, sequences: list[list[int]]) -> list[float]:
        label = f"scores of {self.spec.component}"
        try:
            return model.scores(
                sequences, self.spec.microbatch_tokens, lambda done: self.progress(done, len(sequences), label)
            )
        except Exception:
            held_models().drop(model)  # what it holds now is not known
            raise
