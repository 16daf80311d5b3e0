"""The reward functions score the responses."""

from __future__ import annotations

from ppo_core.records import ScoreJob
from tasks.references import DatasetRef, RolloutsRef, ScoresRef
from tasks.stage import Work, perform, stage
from tasks.workbench import Workbench


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
