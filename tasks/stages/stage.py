"""What all stages share: look in the store, else run an engine's job, store its folder, return a reference.

A stage is a pure function: its key is the sha256 over its name, the spec it reads, the digests of its inputs and the
fingerprint of the engine's code. Prefect's own result cache is not relied on; what the store has comes back in
Prefect's state `Cached`, so its pages are right.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.states import Completed
from prefect.utilities.annotations import quote

from infra.artifacts import ArtifactRef
from infra.artifacts.manifest import ArtifactError
from infra.engines.protocol import EngineError, EngineInput
from infra.hub.sources import HubError
from infra.runs.lease import LeaseLost
from infra.runs.records import RecordError
from infra.storage.objects import StoreUnavailable
from ppo_core.records import FILES_OF, InputError, content_digest
from ppo_core.spec import Section
from tasks.stages.context import RunContext
from tasks.stages.find_verified import find_verified
from tasks.stages.jobs import STATS, DiskSpaceError, StageJob, StageResult
from tasks.stages.references import StageRef
from tasks.stages.source_upload import upload_source
from tasks.stages.table import UPDATE_POLICY, StageDefinition

P = ParamSpec("P")
R = TypeVar("R")
RETRIES = 2
RETRY_DELAYS_S = [1.0, 5.0]
LASTING = (InputError, ValueError, HubError, ArtifactError, RecordError, LeaseLost, StoreUnavailable, DiskSpaceError)
"""Errors that the same stage would meet again; a store that does not answer has been waited for already."""


class Stage(Task[P, R]):
    """A task whose result a plain call returns, also when it comes in the state `Cached`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = {name: _unsearched(value) for name, value in kwargs.items()}
        return super().__call__(*map(_unsearched, args), return_state=True, **named).result()


def stage(name: str, *, retries: int = RETRIES) -> Callable[[Callable[P, Any]], Stage[P, Any]]:
    """Make a function a stage: retried when an engine died or hung, never for input that cannot be used."""

    def wrap(function: Callable[P, Any]) -> Stage[P, Any]:
        return Stage(
            fn=function,
            name=name,
            task_run_name=partial(run_name, name),
            retries=retries,
            retry_delay_seconds=RETRY_DELAYS_S[:retries],
            retry_condition_fn=may_help_again,
            cache_policy=NO_CACHE,
            persist_result=False,
        )

    return wrap


def _unsearched(argument: Any) -> Any:
    """Prefect searches arguments for results of other tasks, at any depth. A context has none, and grows with a run."""
    return quote(argument) if isinstance(argument, RunContext) else argument


def run_name(stage: str, parameters: dict[str, Any]) -> str:
    """What Prefect's pages call one run of a stage: with the iteration that it is of, where it works on a run."""
    context = parameters.get("context")
    return f"{stage}-{context.timings.iteration}" if isinstance(context, RunContext) else stage


def completed(result: R, message: str, name: str = "Completed") -> R:
    """A stage's result in a state that says what came out, as logs and pages show it; outside of Prefect the result.

    Typed as the result, which is what the caller of a stage gets.
    """
    if TaskRunContext.get() is None:
        return result
    return cast(R, Completed(name=name, message=message, data=result))


def may_help_again(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed stage is worth another try."""
    error = state.result(raise_on_failure=False)
    return error.retryable if isinstance(error, EngineError) else not isinstance(error, LASTING)


@dataclass(frozen=True)
class StageSpec:
    """One stage's work: `inputs` are artifacts, `paths` other folders; `finish` completes the folder made.

    `restoration` is what an engine that has lost its warm state needs besides to have it again; the result is the same.
    """

    stage: StageDefinition
    spec: Section
    inputs: Mapping[str, StageRef] = field(default_factory=dict)
    paths: Mapping[str, EngineInput] = field(default_factory=dict)
    finish: Callable[[Path], None] | None = None
    restoration: Mapping[str, ArtifactRef] = field(default_factory=dict)


def key_of(context: RunContext, stage_spec: StageSpec) -> str:
    """The cache key."""
    digests = {name: ref.digest for name, ref in stage_spec.inputs.items()}
    digests |= {name: given.digest for name, given in stage_spec.paths.items() if not name.startswith(FILES_OF)}
    stage, spec = stage_spec.stage, stage_spec.spec.model_dump(mode="json")
    return content_digest([stage.name, stage.job, spec, digests, context.fingerprint(stage.engine)])


def run_cached(
    context: RunContext,
    stage_spec: StageSpec,
    make: Callable[[str], StageResult] | None = None,
    *,
    begun: float | None = None,
) -> Any:
    """The stage's reference, of the class that the stage makes: from the store (as the state `Cached`), or made now.

    It is made by one job, or by `make(key)`. `begun` is when the stage's work began, where this is only the end of it.
    """
    started, stage = time.perf_counter(), stage_spec.stage
    key = key_of(context, stage_spec)
    with context.timings.outside("store"):
        context.pin(stage.kind, key)
        found = find_verified(context, stage.kind, key)
    if found is not None:
        ref = stage.made.of(found, json.loads((context.store.fetch(found) / STATS).read_text()))
        context.timings.add(stage.name, wall=time.perf_counter() - started, cached=True)
        return completed(ref, f"{ref.in_words()}; {stage.kind}/{key} was in the store", "Cached")
    done = context.run_job(stage.engine, job_of(context, stage_spec, key)) if make is None else make(key)
    context.timings.add_outside("store", done.store_s)
    context.timings.add_outside("hops", done.hops_s)
    context.timings.add(stage.name, wall=time.perf_counter() - started, engine=done.engine_s, cached=False)
    ref = stage.made.of(done.ref, done.result)
    return completed(ref, f"{ref.in_words()} in {time.perf_counter() - (begun or started):.1f} s")


def job_of(context: RunContext, stage_spec: StageSpec, key: str) -> StageJob:
    """The stage as a job for its engine."""
    inputs = {name: ref.bare() for name, ref in stage_spec.inputs.items()}
    here = context.engines.handles[stage_spec.stage.engine].reads_our_folders
    return StageJob(
        job=stage_spec.stage.job,
        spec=stage_spec.spec.model_dump(mode="json"),
        kind=stage_spec.stage.kind,
        key=key,
        inputs={**inputs, **stage_spec.restoration},
        folders=stage_spec.paths
        if here
        else {name: upload_source(context, given) for name, given in stage_spec.paths.items()},
        lineage=tuple(inputs.values()),
        finish=stage_spec.finish,
        holds=stage_spec.stage is UPDATE_POLICY,
    )
