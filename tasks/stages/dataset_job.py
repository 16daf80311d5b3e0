"""The jobs that describe a run's data and rewards to the scoring engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from infra.artifacts.fingerprint import file_digest, file_digests
from ppo_core.records import InputError, PrepareDatasetJob, content_digest
from ppo_core.spec import DpoSpec, RunSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.paths import is_function


def dataset_job(spec: RunSpec | DpoSpec) -> PrepareDatasetJob:
    """What of the spec the dataset depends on."""
    examples: dict[str, Any] = {"sft_data": None}
    if spec.sft is not None:
        examples["sft_data"] = spec.sft.data
        examples["sft_prompt_column"] = spec.sft.prompt_column
        examples["sft_completion_column"] = spec.sft.completion_column
    sampled = isinstance(spec, RunSpec) or spec.dataset.evaluates
    return PrepareDatasetJob(
        dataset=spec.dataset,
        model=spec.model,
        max_response_tokens=spec.rollout.max_response_tokens if sampled else 1,
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


def same_data(names: Iterable[str], path: Callable[[str], Path], digests: Mapping[str, str]) -> Callable[[Path], None]:
    """What a stage that reads the user's rows ends with: see `require_same_data`. `digests` are those in its key."""
    own = [name for name in names if not is_hub_name(name) and not is_function(name)]
    return partial(require_same_data, {path(name): digests[name] for name in own})


def require_same_data(digests: Mapping[Path, str], made: Path) -> None:
    """Raise InputError where one of these files or folders was written to before all was `made` of it.

    Nothing is stored then: what was made has the new rows, and its key names the old ones.
    """
    for path, digest in digests.items():
        if data_digest(path) != digest:
            raise InputError(f"{path} changed while it was read: give the command again, once nobody writes to it")


def reward_trial(spec: RunSpec, completions: list[str], *, new: bool) -> dict[str, Any]:
    """The spec of the scoring engine's job `try_reward`. `new`: no run has begun by it yet."""
    return {"dataset": dataset_job(spec).model_dump(mode="json"), "completions": completions, "new": new}
