"""The reward functions score the responses."""

from __future__ import annotations

from ppo_core.records import ScoreJob
from tasks.stages.context import Workbench
from tasks.stages.references import DatasetRef, RolloutsRef, ScoresRef
from tasks.stages.stage import Work, perform, stage


@stage("score_rollouts")
def score_rollouts(bench: Workbench, rollouts: RolloutsRef, dataset: DatasetRef) -> ScoresRef:
    """One score per response, or None where there is none."""
    spec = bench.spec
    job = ScoreJob(reward=spec.reward, answer_column=spec.dataset.answer_column, split="train")
    inputs = {"rollouts": rollouts, "dataset": dataset}
    work = Work(
        "score_rollouts", "scores", "scoring", "score_rollouts", job, inputs, {"sources": bench.rewards()}, ScoresRef
    )
    return perform(bench, work)
