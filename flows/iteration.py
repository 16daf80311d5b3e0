"""One iteration: its stages, the limits they must keep, and its record.

    record k ─► generate ─► score ─► advantages ─► update ─► evaluate ─► guards ─┬─► commit: record k+1
                                                                                ├─► roll back to an earlier record
                                                                                └─► stop: DivergedError

A stage's work is found in the store, or done by an engine; see `tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from flows.ahead import Ahead
from flows.console import RunConsole
from flows.stages import facts_of, run_stages
from ppo_core.spec import RunSpec
from tasks.commit_iteration import commit_iteration, draft_record
from tasks.report import report_rollback
from tasks.runs.errors import EngineError, RecordError, not_finite
from tasks.runs.guards import (
    check_disk,
    current_attempt,
    diverged,
    keep_evidence,
    passed_limits,
    roll_back,
    unseen,
    violations,
)
from tasks.runs.iteration_record import Attempt, IterationRecord
from tasks.runs.notes import last_attempt, rollbacks_of
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef, StageRef
from tasks.stages.table import GENERATE_ROLLOUTS, ITERATION

StageName = Literal["generate", "score", "advantages", "update", "evaluate"]
"""The labels of the stages of an iteration, as the form of a deployment lists them."""


class Rerun(BaseModel):
    """Do iteration `iteration` again from stage `start` on; what the stages before it made is taken from its record."""

    model_config = ConfigDict(frozen=True)

    iteration: PositiveInt
    start: StageName


def begin(context: RunContext, dataset: DatasetRef) -> IterationRecord:
    """Record 0: the policy that PPO starts from, and how good it is."""
    made = run_stages(context, dataset, None, {}, evaluate=context.spec.dataset.evaluates)
    return commit_iteration(context, draft_record(context, made, dataset, None, Attempt()))


def make(
    context: RunContext,
    dataset: DatasetRef,
    previous: IterationRecord,
    attempt: Attempt,
    *,
    again: IterationRecord | None = None,
    start: str = "generate",
    ahead: Ahead | None = None,
) -> dict[str, StageRef]:
    """What the stages of the iteration after `previous` make; those before `start` as the record `again` has it."""
    number, before = previous.iteration + 1, {} if again is None else made_before(again, start)
    full = again.checkpoint.full if again is not None else writes_full(context.spec, number)
    evaluated = again is not None and again.evaluation is not None  # perhaps only as the last one, then
    evaluate = evaluated or evaluates_at(context.spec, number)
    facts = facts_of(context, previous, attempt, full=full)
    if ahead is not None and (rollouts := ahead.take(previous, attempt)):
        before = {**before, GENERATE_ROLLOUTS.name: rollouts}
    return run_stages(context, dataset, previous, facts, evaluate=evaluate, given=before, ahead=ahead)


def made_before(record: IterationRecord, start: str) -> Mapping[str, StageRef]:
    """What of an iteration the stages before `start` made."""
    labels = [stage.label for stage in ITERATION]
    names = [stage.name for stage in ITERATION[: labels.index(start)]]
    return {name: record.artifacts[name] for name in names if name in record.artifacts}


def iterate(
    context: RunContext,
    console: RunConsole,
    dataset: DatasetRef,
    previous: IterationRecord,
    *,
    again: IterationRecord | None = None,
    start: str = "generate",
    ahead: Ahead | None = None,
) -> IterationRecord:
    """One iteration, from the record before to its own; after a rollback, the earlier record to go on from."""
    check_disk(context, previous)
    attempt = current_attempt(context, previous.iteration + 1)
    try:
        made = make(context, dataset, previous, attempt, again=again, start=start, ahead=ahead)
    except EngineError as error:
        complaint = not_finite(error)
        if complaint is None:
            raise
        return gone_wrong(context, console, previous.iteration + 1, [complaint], None)
    try:
        draft = draft_record(context, made, dataset, previous, attempt)
        passed = [str(violation) for violation in passed_limits(context, draft)]
    except RecordError as error:
        measured = {name: value for ref in made.values() for name, value in ref.metrics.items()}
        passed = [str(violation) for violation in violations(context.spec.guards, measured, None)]
        if not passed or context.spec.guards.on_divergence == "warn":
            raise
        raise diverged(context.run, previous.iteration + 1, passed, damage=error) from error
    if passed and context.spec.guards.on_divergence == "warn":
        console.say(
            f"! iteration {draft.iteration}: {'; '.join(passed)}; continuing, because guards.on_divergence=warn"
        )
        draft = draft.model_copy(update={"violations": passed})
    elif passed:
        return gone_wrong(context, console, draft.iteration, passed, draft)
    for blind in unseen(context.spec, draft):
        console.say(f"! {blind}")
    return commit_iteration(context, draft)


def gone_wrong(
    context: RunContext, console: RunConsole, iteration: int, passed: list[str], draft: IterationRecord | None
) -> IterationRecord:
    """Keep the evidence, then go back to an earlier record, or raise DivergedError, also where the way is damaged."""
    evidence = None
    try:
        evidence = keep_evidence(context, iteration, passed, draft)
        if context.spec.guards.on_divergence != "rollback":
            raise diverged(context.run, iteration, passed, evidence, made=draft is not None)
        record = roll_back(context, iteration, passed)
        if record is None:
            done = last_attempt(rollbacks_of(context.records).values()).number
            raise diverged(context.run, iteration, passed, evidence, spent=done, made=draft is not None)
        attempt = current_attempt(context, record.iteration + 1)
    except RecordError as error:
        raise diverged(context.run, iteration, passed, evidence, damage=error, made=draft is not None) from error
    count = f"rollback {attempt.number} of {context.spec.guards.max_rollbacks}"
    console.say(
        f"! iteration {iteration} diverged: {'; '.join(passed)} (evidence: {evidence}); {count}: back to iteration "
        f"{record.iteration}, with other samples and learning rates times {attempt.rate_factor:g}"
    )
    report_rollback(context, record)
    context.timings.restart()
    return record


def writes_full(spec: RunSpec, iteration: int) -> bool:
    """Whether an iteration writes critic and optimizers too: every so often, and at the end."""
    return iteration % spec.checkpoint.every == 0 or iteration == spec.iterations


def evaluates_at(spec: RunSpec, iteration: int) -> bool:
    """Whether an iteration ends with an evaluation: every so often, and at the end."""
    due = iteration % spec.evaluation.every == 0 or iteration == spec.iterations
    return due and spec.dataset.evaluates
