"""The specs of the jobs that make preferences and reward models."""

from __future__ import annotations

from typing import Literal

from ppo_core.spec import FitSpec, ModelSpec, PreferencesSpec, Section, TrainingSpec


class PreparePreferencesJob(Section):
    """Read, check and tokenize preferences. Inputs: sources, tokenizer; model, where the spec names a folder.

    Tokens are those that a reward model reads, or `by_policy` those that a policy reads and writes; the form of its
    prompts is that of `DatasetSpec`.
    """

    dataset: PreferencesSpec
    model: ModelSpec
    by_policy: bool = False
    chat: bool = False
    system_prompt: str | None = None

    @property
    def section(self) -> str:
        """Where the preferences stand in the spec."""
        return "preferences" if self.by_policy else "dataset"


class PairSamplesJob(Section):
    """Make preferences of scored samples. Inputs: dataset_N, rollouts_N and scores_N of each iteration N."""

    iterations: tuple[int, ...]


class TrainRewardModelJob(Section):
    """Train a reward model on preferences. Inputs: dataset, tokenizer; model, where the spec names a folder."""

    seed: int
    model: ModelSpec
    fit: FitSpec
    training: TrainingSpec
    deterministic: bool = False


class EvaluateRewardModelJob(Section):
    """Score held-out preferences. Inputs: model, dataset. A forward pass has `microbatch_tokens` tokens, at most."""

    dtype: Literal["float32", "bfloat16"]
    microbatch_tokens: int
