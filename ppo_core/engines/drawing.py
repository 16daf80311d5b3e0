"""Which prompts of a dataset a job answers, in which order, with which seeds, and how each is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ppo_core.data.number_columns import limit_column, temperature_column
from ppo_core.data.tables import count_prompts, read_difficulty, read_prompts, read_shares
from ppo_core.records import GenerateJob, InputError, PromptRow
from ppo_core.sampling import Draw, EasyFirst, draw_prompts, draws


def drawn(dataset: Path, spec: GenerateJob) -> tuple[dict[int, PromptRow], list[Draw]]:
    """The prompts by the number of their row, and all draws of a whole job.

    All of them also where a part is asked for: which sample of its prompt one is depends on those before it. Raises
    InputError where fewer rows are held out than an evaluation asks for.
    """
    table = dataset / f"{spec.split}.parquet"
    there, easy_first = count_prompts(table), None
    if spec.split == "eval" and spec.num_prompts > there:
        raise InputError(f"evaluation.num_prompts={spec.num_prompts}, but only {there} rows are held out: lower it")
    if spec.curriculum is not None and spec.position < spec.curriculum.prompts:
        easy_first = EasyFirst(read_difficulty(table, spec.curriculum.column), spec.curriculum.prompts)
    rows = draw_prompts(
        there,
        spec.position,
        spec.num_prompts,
        seed=spec.seed,
        shuffle=spec.shuffle,
        shares=read_shares(dataset, spec.split),
        easy_first=easy_first,
    )
    distinct = sorted(set(rows))
    prompts = dict(zip(distinct, read_prompts(table, rows=distinct), strict=True))
    ids = {row: prompt.prompt_id for row, prompt in prompts.items()}
    return prompts, draws(rows, ids, spec.samples_per_prompt, seed=spec.seed, stream=spec.stream)


class Sampling(NamedTuple):
    """How one prompt is answered."""

    temperature: float
    max_tokens: int


def sampling_of(prompt: PromptRow, spec: GenerateJob) -> Sampling:
    """The job's, but for what the prompt has in columns that were checked when its dataset was made."""
    temperatures = temperature_column(spec.temperature_column)
    limits = limit_column(spec.max_response_tokens_column, spec.max_response_tokens)
    temperature = None if temperatures is None else temperatures.of(prompt.metadata)
    limit = None if limits is None else limits.of(prompt.metadata)
    return Sampling(
        spec.temperature if temperature is None else temperature,
        spec.max_response_tokens if limit is None else int(limit),
    )
