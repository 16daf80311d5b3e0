"""Which prompts of a dataset a job answers, in which order, and with which seeds."""

from __future__ import annotations

from pathlib import Path

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
