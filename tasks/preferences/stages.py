"""The stages that learn from preferences: what each makes, by which engine, and what others ask of it.

prepare_preferences ─► train_reward_model ─► evaluate_reward_model
prepare_preferences ─► train_dpo (from the checkpoint of start_policy)
"""

from __future__ import annotations

from typing import Any

from tasks.stages.references import StageRef
from tasks.stages.table import StageDefinition

MODEL, POLICY = "model", "policy"
"""The Hugging Face folder in the artifact of a reward model, and in that of a policy."""


class PreferencesRef(StageRef):
    """Preferences: `counts` has the rows of each split, `pairs` what is compared in them.

    `described` is what `ppo_core/data/description.py` says of them.
    """

    counts: dict[str, int]
    pairs: dict[str, int]
    context_length: int | None = None
    described: dict[str, Any]

    def in_words(self) -> str:
        pairs, repeated = self.pairs, self.described["held_out_trained"]
        known = f" ({repeated:,} of {self.counts['eval']:,} rows have a prompt that is trained on)" if repeated else ""
        return f"{pairs['train']:,} pairs to train on, {pairs['eval']:,} held out{known}"


class RewardModelRef(StageRef):
    """A reward model, with the loss of each of its steps."""

    losses: tuple[float, ...]

    def in_words(self) -> str:
        return f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {len(self.losses)} steps"


class DpoPolicyRef(StageRef):
    """A policy that was trained on preferences, with what was measured at each of its steps."""

    curves: dict[str, tuple[float, ...]]

    def in_words(self) -> str:
        return self.measured(
            {
                "held-out accuracy": "evaluation/rewards/accuracies:.3f",
                "margin": "evaluation/rewards/margins:.3f",
                "loss": "evaluation/loss:.3f",
            }
        )


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
TRAIN_DPO = StageDefinition("train_dpo", "dpo_policy", "training", "train_dpo", DpoPolicyRef)
EVALUATE_REWARD_MODEL = StageDefinition(
    "evaluate_reward_model", "reward_evaluation", "scoring", "evaluate_reward_model", RewardEvaluationRef
)
