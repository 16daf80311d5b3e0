"""The reward model as it was saved scores held-out responses."""

from __future__ import annotations

from ppo_core.records import EvaluateRewardModelJob
from tasks.preferences.context import RewardModelContext
from tasks.preferences.stages import EVALUATE_REWARD_MODEL, PreferencesRef, RewardEvaluationRef, RewardModelRef
from tasks.stages.stage import StageSpec, run_cached, stage

TOKENS = 4096


@stage(EVALUATE_REWARD_MODEL.name)
def evaluate_reward_model(
    context: RewardModelContext, model: RewardModelRef, dataset: PreferencesRef
) -> RewardEvaluationRef:
    """By the code that the reward kind `model` scores with: what is measured is what PPO will see."""
    spec = context.spec
    job = EvaluateRewardModelJob(dtype=spec.model.dtype, microbatch_tokens=spec.training.microbatch_tokens or TOKENS)
    return run_cached(context, StageSpec(EVALUATE_REWARD_MODEL, job, {"model": model, "dataset": dataset}))
