"""The stages that make a reward model: what each makes, by which engine, and what others ask of it.

prepare_preferences ─► train_reward_model ─► evaluate_reward_model
"""

from __future__ import annotations

from typing import Any

from tasks.stages.references import StageRef
from tasks.stages.table import StageDefinition

MODEL = "model"
"""The Hugging Face folder in the artifact of a reward model."""


class PreferencesRef(StageRef):
    """Preferences: `counts` has the rows of each split, `pairs` what is compared in them."""

    counts: dict[str, int]
    pairs: dict[str, int]
    context_length: int | None = None

    def in_words(self) -> str:
        pairs = self.pairs
        return f"{pairs['train']:,} pairs to train on, {pairs['eval']:,} held out"


class RewardModelRef(StageRef):
    """A reward model, with the loss of each of its steps."""

    losses: tuple[float, ...]

    def in_words(self) -> str:
        return f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {len(self.losses)} steps"


class RewardEvaluationRef(StageRef):
    """What a reward model says of held-out pairs; see `ppo_core/scoring/preferences.py`."""

    calibration: list[dict[str, float]]
    distribution: dict[str, list[Any]]

    def in_words(self) -> str:
        return self.measured(
            {
                "accuracy": "reward_model/accuracy:.3f",
                "log loss": "reward_model/log_loss:.3f",
                "calibration error": "reward_model/calibration_error:.3f",
            }
        )


PREPARE_PREFERENCES = StageDefinition(
    "prepare_preferences", "preferences", "scoring", "prepare_preferences", PreferencesRef
)
TRAIN_REWARD_MODEL = StageDefinition(
    "train_reward_model", "reward_model", "training", "train_reward_model", RewardModelRef
)
EVALUATE_REWARD_MODEL = StageDefinition(
    "evaluate_reward_model", "reward_evaluation", "scoring", "evaluate_reward_model", RewardEvaluationRef
)
