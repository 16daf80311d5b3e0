"""The jobs that describe a run's data and rewards to the scoring engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.artifacts.fingerprint import file_digest, file_digests
from ppo_core.records import InputError, PrepareDatasetJob, content_digest
from ppo_core.spec import DpoSpec, RunSpec


def dataset_job(spec: RunSpec | DpoSpec) -> PrepareDatasetJob:
    """What of the spec the dataset depends on."""
    examples: dict[str, Any] = {"sft_data": None}
    if spec.sft is not None:
        examples["sft_data"] = spec.sft.data
        examples["sft_prompt_column"] = spec.sft.prompt_column
        examples["sft_completion_column"] = spec.sft.completion_column
    return PrepareDatasetJob(
        dataset=spec.dataset,
        model=spec.model,
        max_response_tokens=spec.rollout.max_response_tokens,
        max_response_tokens_column=spec.rollout.max_response_tokens_column,
        temperature_column=spec.rollout.temperature_column,
        stop_token_ids=spec.rollout.stop_token_ids,
        num_eval_prompts=spec.evaluation.num_prompts if spec.dataset.evaluates else 0,
        reward=spec.reward,
        **examples,
    )


def data_digest(path: Path) -> str:
    """Of the user's rows, in a file or a folder. Raises InputError where there are none."""
    if not path.exists():
        raise InputError(f"there is no file {path}: give a file of rows or path/to/file.py:function")
    return file_digest(path) if path.is_file() else content_digest(file_digests(path))


def reward_trial(spec: RunSpec, completions: list[str], *, new: bool) -> dict[str, Any]:
    """The spec of the scoring engine's job `try_reward`. `new`: no run has begun by it yet."""
    return {"dataset": dataset_job(spec).model_dump(mode="json"), "completions": completions, "new": new}
