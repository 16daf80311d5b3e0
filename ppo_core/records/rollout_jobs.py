"""The spec of each job of the rollout engine: what a stage's cache key covers besides its inputs and the code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ppo_core.spec import CurriculumSpec, EvaluatedWeights, ModelSpec, Section
from ppo_core.spec.sections import ComputeDtype


class SamplingJob(Section):
    """What every job says that needs vLLM. By itself: start it before there is a policy, of a run that begins with
    `model`. Inputs: dataset, tokenizer; model, where the spec names a folder.

    `stop` are texts that end a response beside EOS. vLLM computes in bf16 where `model.dtype` says so, else as
    `compute_dtype` does.
    """

    max_response_tokens: int
    stop: tuple[str, ...] = ()
    model: ModelSpec
    compute_dtype: ComputeDtype = "float32"
    kv_cache_gib: float
    tensor_parallel_size: int


class GenerateJob(SamplingJob):
    """Sample responses. Inputs: checkpoint, dataset.

    `stream` is the iteration, or a name such as `evaluation`: part of every request's seed. `position` is the data
    cursor: prompts drawn so far. `temperature` 0 is greedy. `stop_token_ids` end a response beside EOS and `stop`.
    `weights` is the checkpoint's folder of who answers. The columns have temperatures and limits of single prompts.
    """

    seed: int
    stream: int | str
    split: Literal["train", "eval"]
    position: int = Field(ge=0)
    num_prompts: int
    shuffle: bool
    samples_per_prompt: int
    stop_token_ids: tuple[int, ...] = ()
    temperature: float
    deterministic: bool = False
    weights: EvaluatedWeights = "policy"
    curriculum: CurriculumSpec | None = None
    temperature_column: str | None = None
    max_response_tokens_column: str | None = None


class GenerateShardJob(Section):
    """Sample the responses to a contiguous part of the prompts that `whole` draws. Inputs: checkpoint, dataset.

    The part is prompts `first` to `first + count`; its rows are those that the whole job would give.
    """

    whole: GenerateJob
    first: int = Field(ge=0)
    count: int = Field(ge=1)
