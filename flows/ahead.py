"""Sampling the next iteration's responses while the policy learns from this one's (`schedule: overlapped`).

    iteration k      generate ─► score ─► advantages ─► update ─► evaluate ─► record k
    iteration k+1    generate, by the policy of record k-1 ........................... ─► score ─► …

What is sampled ahead is the same stage of the same inputs as without haste, so it is the same artifact: where it was
not finished, failed or is gone, the iteration samples it itself, to the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.generate_rollouts import generate_rollouts
from tasks.runs.guards import current_attempt
from tasks.runs.iteration_record import Attempt, IterationRecord
from tasks.stages.context import RunContext
from tasks.stages.jobs import all_done
from tasks.stages.references import CheckpointRef, DatasetRef, RolloutsRef
from tasks.stages.table import GENERATE_ROLLOUTS
from tasks.stages.timings import Timings


@dataclass(frozen=True)
class Sampling:
    """Responses under way: of which iteration and attempt, by which checkpoint, and where their seconds are counted."""

    iteration: int
    attempt: int
    sampler: CheckpointRef
    timings: Timings
    future: Future[RolloutsRef]


@dataclass
class Ahead:
    """Samples at most one iteration ahead, in a thread of its own; nothing where the schedule is synchronous."""

    context: RunContext
    pool: ThreadPoolExecutor
    under_way: Sampling | None = None
    waiting: bool = field(default=False, init=False)

    def begin(self, dataset: DatasetRef, previous: IterationRecord) -> None:
        """The iteration after `previous` has its responses: begin with those of the iteration after that."""
        spec, iteration = self.context.spec, previous.iteration + 2
        if spec.schedule != "overlapped" or iteration > spec.iterations:
            return
        timings, attempt = Timings(iteration=iteration), current_attempt(self.context, iteration).number
        context = replace(self.context, timings=timings, on_progress=self._progress)
        work = self.pool.submit(
            copy_context().run,
            generate_rollouts,
            context,
            previous.checkpoint,
            dataset,
            iteration=iteration,
            position=previous.position + spec.rollout.prompts_per_iteration,
            attempt=attempt,
        )
        self.under_way = Sampling(iteration, attempt, previous.checkpoint, timings, work)

    def settle(self) -> None:
        """Wait until nothing is sampled any more: the rollout engine does one thing at a time."""
        if self.under_way is None or self.under_way.future.done():
            return
        started, self.waiting = time.perf_counter(), True
        all_done({self.under_way.iteration: self.under_way.future})
        self.waiting = False
        self.context.timings.add(GENERATE_ROLLOUTS.name, engine=time.perf_counter() - started)

    def take(self, previous: IterationRecord, attempt: Attempt) -> RolloutsRef | None:
        """The responses of the iteration after `previous`; None where they have to be sampled now."""
        self.settle()
        sampled, self.under_way = self.under_way, None
        if sampled is None or sampled.future.exception() is not None:
            return None
        wanted = previous.iteration + 1, attempt.number, previous.next_sampler.digest
        if (sampled.iteration, sampled.attempt, sampled.sampler.digest) != wanted:
            return None
        rollouts = sampled.future.result()
        self.context.pin(rollouts.kind, rollouts.key)
        if self.context.store.find(rollouts.kind, rollouts.key) is None:
            return None
        self.context.timings.scored_ahead = sampled.timings.scored_ahead
        took = sampled.timings.stages[GENERATE_ROLLOUTS.name]
        self.context.timings.add(GENERATE_ROLLOUTS.name, wall=took.wall, cached=took.cached)
        return rollouts

    def _progress(self, progress: Any) -> None:
        if self.waiting:
            self.context.on_progress(progress)


@contextmanager
def sampling_ahead(context: RunContext) -> Iterator[Ahead]:
    """On the way out nothing is waited for: with the run its engines end, and with them what is under way."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
    try:
        yield Ahead(context, pool)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
