"""Sampling responses with one rollout engine or several: what is stored is the same, byte for byte.

    drawn prompts ─┬─► rollout:   prompts 0..85    ─► shard ─┐
                   ├─► rollout-2: prompts 86..170  ─► shard ─┼─► rollout: merge ─► rollouts
                   └─► rollout-3: prompts 171..255 ─► shard ─┘

Every shard is an artifact of its own, so a retry after a death samples only what is missing. Where rewards score each
sample by itself, responses are scored as they are finished, while others are sampled (`scoring_ahead`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from infra.engines.hardware import has_nvidia_gpu
from infra.engines.protocol import EngineInput, EngineJob, EngineProgress, OnProgress
from infra.engines.relay import Relay, Row
from infra.storage.outage import stop_waiting
from ppo_core.records import GenerateJob, GenerateShardJob, SamplingJob, ScoreAheadJob
from tasks.stages.context import RunContext
from tasks.stages.find_verified import find_verified
from tasks.stages.jobs import StageJob, StageResult, all_done
from tasks.stages.references import DatasetRef, StageRef
from tasks.stages.stage import StageSpec, job_of, key_of, run_cached
from tasks.stages.table import SCORE_ROLLOUTS, StageDefinition

ROLE = "rollout"


def prepare_sampling(context: RunContext, dataset: DatasetRef) -> None:
    """Have vLLM start while the policy is still fine-tuned: the first one to answer then only has to be swapped in."""
    names = [name for name in context.engines.rollout_names if context.can_prepare(name)]
    # On a GPU vLLM would take memory that fine-tuning may need, which holds no more than an update does on CPU; and who
    # takes turns waits for them.
    if not names or has_nvidia_gpu() or context.engines.turns.sides:
        return
    spec, engines = context.spec, context.spec.engines
    job = SamplingJob(
        max_response_tokens=spec.rollout.max_response_tokens,
        stop=spec.rollout.stop,
        model=spec.model,
        compute_dtype=spec.rollout.compute_dtype(spec.training),
        kv_cache_gib=engines.kv_cache_gib,
        tensor_parallel_size=engines.tensor_parallel_size,
    )
    inputs = {
        "dataset": EngineInput(context.store.fetch(dataset.bare()), dataset.digest),
        "tokenizer": context.tokenizer(),
        **context.model_inputs(),
    }
    for name in names:
        context.prepare(
            name, EngineJob("prepare_sampling", inputs, context.store.scratch(), job.model_dump(mode="json"))
        )


def sample_responses(
    context: RunContext,
    stage: StageDefinition,
    job: GenerateJob,
    inputs: Mapping[str, StageRef],
    *,
    score_ahead: bool = False,
) -> Any:
    """The reference to rollouts: from the store (as the state `Cached`), or sampled now by all rollout engines.

    With `score_ahead` what is sampled now is scored meanwhile, as far as the run's rewards allow.
    """
    stage_spec, names = StageSpec(stage, job, inputs), context.engines.rollout_names

    def make(key: str) -> StageResult:
        with scoring_ahead(context, inputs["dataset"], key) if score_ahead else nullcontext() as relay:
            if min(len(names), job.num_prompts) == 1:
                return sampled(context, names[0], job_of(context, stage_spec, key), relay, context.on_progress)
            return by_several(context, stage_spec, key, job, names, relay)

    return run_cached(context, stage_spec, make)


@contextmanager
def scoring_ahead(context: RunContext, dataset: StageRef, key: str) -> Iterator[Relay | None]:
    """Have responses scored that the relay hears of, while the block samples the rollouts of `key`.

    By those rewards that score each sample by itself; None where there are none. The scoring engine remembers the
    scores for `score_rollouts`: what it fails at now is scored there, or fails there.
    """
    spec = context.spec
    rewards = [reward for reward in spec.reward.rewards if reward.sample_by_sample]
    if not rewards:
        yield None
        return
    inputs = {"dataset": EngineInput(context.store.fetch(dataset.bare()), dataset.digest), **context.rewards()}
    counted = context.timings.begin_ahead()

    def show(progress: EngineProgress) -> None:
        if context.scoring_spare.wanted:  # the stage waits for this
            context.on_progress(replace(progress, job=SCORE_ROLLOUTS.job))

    def score(rows: Sequence[Row]) -> bool:
        job = ScoreAheadJob.model_validate(
            {"rewards": rewards, "answer_column": spec.dataset.answer_column, "split": "train", "responses": rows}
        )
        engine_job = EngineJob("score_ahead", inputs, None, job.model_dump(mode="json"))
        reply = context.engines.scoring.run(engine_job, timeout_s=spec.engines.reward_timeout_s, on_progress=show)
        scored = [rows[number] for number in reply.result["scored"]]
        if not relay.ended:
            counted.update((key, row["prompt_id"], row["sample_index"]) for row in scored)
        return bool(scored)

    relay = Relay(score, context.scoring_spare)
    try:
        yield relay
    finally:
        relay.close()


def sampled(
    context: RunContext, engine: str, stage_job: StageJob, relay: Relay | None, on_progress: OnProgress
) -> StageResult:
    """Have a rollout engine sample, and the relay hear of what is finished."""
    if relay is None:
        return context.run_job(engine, stage_job, on_progress)
    return context.run_job(engine, replace(stage_job, reports_rows=True), relay.hear(on_progress))


def by_several(
    context: RunContext,
    stage_spec: StageSpec,
    key: str,
    job: GenerateJob,
    names: Sequence[str],
    relay: Relay | None,
) -> StageResult:
    """Sample shards side by side and merge them. Waits for all of them, also where one fails: they are kept."""
    started = time.perf_counter()
    parts = cut(job.num_prompts, len(names))
    shards = [
        replace(
            stage_spec,
            stage=replace(stage_spec.stage, kind="shard", job="generate_shard", made=StageRef),
            spec=GenerateShardJob(whole=job, first=part.start, count=len(part)),
        )
        for part in parts
    ]
    stage_jobs = [job_of(context, shard, key_of(context, shard)) for shard in shards]
    for stage_job in stage_jobs:
        context.pin(stage_job.kind, stage_job.key)
    found = [find_verified(context, stage_job.kind, stage_job.key) for stage_job in stage_jobs]
    looked_s = time.perf_counter() - started
    missing = {number: stage_job for number, stage_job in enumerate(stage_jobs) if found[number] is None}
    rows = sum(len(parts[number]) for number in missing) * job.samples_per_prompt
    together = Together(context.on_progress, rows, len(missing))
    with ThreadPoolExecutor(len(stage_jobs)) as pool:
        sent = {
            number: pool.submit(sampled, context, names[number], stage_job, relay, together.part(number))
            for number, stage_job in missing.items()
        }
        try:
            done = {number: future.result() for number, future in all_done(sent).items()}
        except BaseException as error:
            if not isinstance(error, Exception):
                # The run ends, and what is under way would hold it up.
                context.engines.close()
                stop_waiting()
            raise
    refs = [ref or done[number].ref for number, ref in enumerate(found)]
    merged = context.run_job(names[0], merging(job_of(context, stage_spec, key), refs))
    slowest = max(done.values(), key=lambda shard: shard.engine_s + shard.store_s + shard.hops_s, default=None)
    return after(merged, slowest, looked_s)


def merging(whole: StageJob, shards: Sequence[Any]) -> StageJob:
    """The job that stores, under the whole's key and with its lineage, what the shards hold."""
    inputs = {f"shard_{number}": ref for number, ref in enumerate(shards)}
    return replace(whole, job="merge_rollouts", spec={}, inputs=inputs)


def after(merged: StageResult, slowest: StageResult | None, looked_s: float) -> StageResult:
    """The merged artifact with the seconds of the longest way to it."""
    if slowest is None:
        return replace(merged, store_s=merged.store_s + looked_s)
    return replace(
        merged,
        engine_s=merged.engine_s + slowest.engine_s,
        store_s=merged.store_s + slowest.store_s + looked_s,
        hops_s=merged.hops_s + slowest.hops_s,
    )


def cut(number: int, parts: int) -> list[range]:
    """0 to `number` in at most `parts` contiguous ranges, none empty, whose lengths differ by one at most.

    >>> cut(5, 3)
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    parts = min(number, parts)
    bounds = [number * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


@dataclass
class Together:
    """Shows the progress of several engines as that of one."""

    on_progress: OnProgress
    total: int
    engines: int
    done: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def part(self, number: int) -> OnProgress:
        """What is called with the progress of one engine."""

        def see(progress: EngineProgress) -> None:
            with self.lock:
                if progress.total:
                    self.done[number] = progress.done
                    note = f"{progress.note} of {self.engines} engines"
                    done = sum(self.done.values())
                    progress = EngineProgress(ROLE, "generate_rollouts", done, self.total, note)
                self.on_progress(progress)

        return see
