"""Sampling until enough prompts have responses of different scores (`rollout.dynamic_sampling`).

    batch 0: generate ─► score ─┐ enough?
    batch 1: generate ─► score ─┤ enough?      the next prompts of the same order, at most max_batches times
    …                           └─► select ─► rollouts, as many as without it

Every batch is an artifact of its own, so a retry after a death makes only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect.client.schemas.objects import State

from ppo_core.records import WITH_SIGNAL, GenerateJob, ScoreJob, SelectJob
from tasks.stages.context import RunContext
from tasks.stages.jobs import StageResult
from tasks.stages.references import StageRef
from tasks.stages.sharded_sampling import sample_responses
from tasks.stages.stage import StageSpec, job_of, run_cached
from tasks.stages.table import GENERATE_ROLLOUTS, SCORE_ROLLOUTS

SCORE_BATCH = replace(SCORE_ROLLOUTS, name=GENERATE_ROLLOUTS.name)
SELECT = replace(GENERATE_ROLLOUTS, engine="scoring", job="select_rollouts")
"""Parts of the stage that makes the rollouts."""


def sample_until_signal(
    context: RunContext, job: GenerateJob, inputs: Mapping[str, StageRef], *, max_batches: int
) -> Any:
    """The rollouts to the first `job.num_prompts` prompts with a signal; see `ppo_core.engines.selection`."""
    reward, column, begun = context.spec.reward, context.spec.dataset.answer_column, time.perf_counter()
    sources = context.rewards()
    scoring = {**sources, "tokenizer": context.tokenizer()}
    size, advantages = job.samples_per_prompt, context.spec.advantages
    counted, clip = advantages.truncated != "mask", advantages.raw_score_clip
    score = ScoreJob(
        reward=reward,
        answer_column=column,
        split="train",
        samples_per_prompt=size,
        truncated_count=counted,
        score_clip=clip,
    )
    made: dict[str, StageRef] = {}
    with_signal, batches = 0.0, 0
    while with_signal < job.num_prompts and batches < max_batches:
        batch = batch_of(job, batches)
        rollouts = made_by(sample_responses(context, GENERATE_ROLLOUTS, batch, inputs, score_ahead=True))
        scored = {"rollouts": rollouts, "dataset": inputs["dataset"]}
        scores = made_by(run_cached(context, StageSpec(SCORE_BATCH, score, scored, scoring)))
        made |= {f"rollouts_{batches}": rollouts, f"scores_{batches}": scores}
        with_signal, batches = with_signal + scores.metrics[WITH_SIGNAL], batches + 1
    select = SelectJob(
        reward=reward,
        answer_column=column,
        num_batches=batches,
        num_prompts=job.num_prompts,
        samples_per_prompt=size,
        truncated_count=counted,
        score_clip=clip,
    )
    work, named = StageSpec(SELECT, select, made, sources), tuple(ref.bare() for ref in inputs.values())

    def make(key: str) -> StageResult:  # its lineage is that of any rollouts: no record names the batches
        return context.run_job(SELECT.engine, replace(job_of(context, work, key), lineage=named))

    return run_cached(context, work, make, begun=begun)


def batch_of(job: GenerateJob, number: int) -> GenerateJob:
    """The next prompts, with seeds of their own: a prompt may come again. Batch 0 is the job itself."""
    if number == 0:
        return job
    position = job.position + number * job.num_prompts
    return job.model_copy(update={"position": position, "stream": f"{job.stream}, batch {number}"})


def made_by(outcome: State[Any] | StageRef) -> StageRef:
    """What came out, also where it comes as a state of Prefect's."""
    found: StageRef = outcome.result() if isinstance(outcome, State) else outcome
    return found
