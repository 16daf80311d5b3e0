"""The jobs that describe a run's data and rewards to the scoring engine."""

from __future__ import annotations

from typing import Any

from ppo_core.records import PrepareDatasetJob
from ppo_core.spec import RunSpec


def dataset_job(spec: RunSpec) -> PrepareDatasetJob:
    """What of the spec the dataset depends on."""
    return PrepareDatasetJob(
        dataset=spec.dataset,
        model=spec.model,
        sft_data=spec.sft.data if spec.sft else None,
        max_response_tokens=spec.rollout.max_response_tokens,
        num_eval_prompts=0 if spec.dataset.evaluation is None else spec.evaluation.num_prompts,
        reward=spec.reward,
    )


def reward_trial(spec: RunSpec) -> dict[str, Any]:
    """The spec of the scoring engine's job `try_reward`, but for the completions."""
    return {
        "reward": spec.reward.model_dump(mode="json"),
        "train": spec.dataset.train,
        "sft_data": spec.sft.data if spec.sft else None,
        "answer_column": spec.dataset.answer_column,
    }
