"""The reward functions score the responses."""

from __future__ import annotations

from ppo_core.records import ScoreJob
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef, RolloutsRef, ScoresRef
from tasks.stages.stage import StageSpec, run_cached, stage
from tasks.stages.table import SCORE_ROLLOUTS


@stage(SCORE_ROLLOUTS.name)
def score_rollouts(context: RunContext, rollouts: RolloutsRef, dataset: DatasetRef) -> ScoresRef:
    """One score per response, in parts or not, or None where there is none."""
    spec = context.spec
    job = ScoreJob(reward=spec.reward, answer_column=spec.dataset.answer_column, split="train")
    inputs = {"rollouts": rollouts, "dataset": dataset}
    paths = {**context.rewards(), "tokenizer": context.tokenizer()}
    return run_cached(context, StageSpec(SCORE_ROLLOUTS, job, inputs, paths))
