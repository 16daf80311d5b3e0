"""Running the stages of one iteration, as the table of stages has them (`tasks.stages.table`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flows.ahead import Ahead
from tasks.compute_advantages import compute_advantages
from tasks.evaluate_policy import evaluate_policy
from tasks.finetune_policy import finetune_policy
from tasks.generate_rollouts import generate_rollouts
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.fork import price
from tasks.runs.iteration_record import Attempt, IterationRecord
from tasks.runs.run_state import recorded_spec, with_changes
from tasks.score_rollouts import score_rollouts
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef, StageRef
from tasks.stages.table import (
    COMPUTE_ADVANTAGES,
    EVALUATE_POLICY,
    FINETUNE_POLICY,
    GENERATE_ROLLOUTS,
    PREVIOUS,
    REFERENCE,
    SAMPLER,
    StageDefinition,
    stages_of,
)
from tasks.start_policy import start_policy
from tasks.update_policy import update_policy

TASKS = {
    task.name: task
    for task in (
        prepare_dataset,
        finetune_policy,
        start_policy,
        generate_rollouts,
        score_rollouts,
        compute_advantages,
        update_policy,
        evaluate_policy,
    )
}


def run_stage(
    context: RunContext, stage: StageDefinition, sources: Mapping[str, StageRef], facts: Mapping[str, Any]
) -> StageRef:
    """One stage, given what the table says that it needs."""
    inputs = {argument: sources.get(source) for argument, source in stage.inputs.items()}
    return TASKS[stage.name](context, **inputs, **{name: facts[name] for name in stage.facts})


def run_stages(
    context: RunContext,
    dataset: DatasetRef,
    previous: IterationRecord | None,
    facts: Mapping[str, Any],
    *,
    evaluate: bool,
    given: Mapping[str, StageRef] = {},
    ahead: Ahead | None = None,
) -> dict[str, StageRef]:
    """What the stages of the iteration after `previous` (None: the start) make, by their names.

    What is `given` is taken as it is; `ahead` samples for the next iteration meanwhile. Left out are the evaluation,
    unless asked to `evaluate`, and fine-tuning where the spec has none.
    """
    context.timings.iteration = 0 if previous is None else previous.iteration + 1
    sources: dict[str, StageRef] = {"dataset": dataset}
    if previous is not None:
        late = context.spec.schedule == "overlapped"  # a fork need not be as its source was
        sampler = previous.next_sampler if late else previous.checkpoint
        sources |= {PREVIOUS: previous.checkpoint, SAMPLER: sampler, REFERENCE: previous.reference}
    made: dict[str, StageRef] = {}
    wanted = {EVALUATE_POLICY.name: evaluate, FINETUNE_POLICY.name: context.spec.sft is not None}
    for stage in stages_of(context.timings.iteration):
        if not wanted.get(stage.name, True):
            continue
        if ahead is not None and stage is EVALUATE_POLICY:
            ahead.settle()
        made[stage.name] = given.get(stage.name) or run_stage(context, stage, sources, facts)
        sources[stage.kind] = made[stage.name]
        if ahead is not None and previous is not None and stage is GENERATE_ROLLOUTS:
            ahead.begin(dataset, previous)
    return made


def facts_of(context: RunContext, previous: IterationRecord, attempt: Attempt, *, full: bool) -> dict[str, Any]:
    """What the records say of the iteration after `previous`; with `full` its checkpoint has critic and optimizers.

    A fork goes on from records of its source: with another price of divergence than they have, that is as it begins;
    with another reward, there are no moments of its scores yet.
    """
    carried, kl_coef, began_with = previous.carried(), previous.next_kl_coef, recorded_spec(context.records)
    if previous.forked_from is not None and began_with is not None:
        then, now = with_changes(began_with, previous.changed), context.spec
        kl_coef = kl_coef if price(then) == price(now) else now.advantages.kl.coef
        if then.reward != now.reward:
            carried.pop(COMPUTE_ADVANTAGES.name, None)
    return {
        "iteration": previous.iteration + 1,
        "position": previous.position,
        "attempt": attempt.number,
        "kl_coef": kl_coef,
        "carried": carried,
        "rate_factor": attempt.rate_factor,
        "full": full,
        "restoration": previous.restoration(),
    }


def run_again(
    context: RunContext, record: IterationRecord, previous: IterationRecord | None
) -> Iterator[tuple[StageDefinition, StageRef]]:
    """Each stage of a recorded iteration, each from its recorded inputs, and what it makes now."""
    full = record.checkpoint.full
    facts = {} if previous is None else facts_of(context, previous, record.attempt_settings, full=full)
    for stage in stages_of(record.iteration):
        if stage.name in record.artifacts:
            yield stage, run_stage(context, stage, record.sources(previous), facts)
