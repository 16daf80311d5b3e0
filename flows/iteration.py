"""One iteration: its stages, the limits they must keep, and its record.

    record k ─► generate ─► score ─► advantages ─► update ─► evaluate ─► guards ─┬─► commit: record k+1
                                                                                ├─► roll back to an earlier record
                                                                                └─► stop: DivergedError

A stage's work is found in the store, or done by an engine; see `tasks`.
"""

from __future__ import annotations

from typing import Literal

from flows.console import RunConsole
from infra.artifacts import ArtifactRef
from ppo_core.spec import RunSpec
from tasks.commit_iteration import Made, commit_iteration, draft_record
from tasks.compute_advantages import compute_advantages
from tasks.evaluate_policy import evaluate_policy
from tasks.generate_rollouts import generate_rollouts
from tasks.runs.errors import EngineError, not_finite
from tasks.runs.guards import check_disk, current_attempt, diverged, keep_evidence, passed_limits, roll_back
from tasks.runs.iteration_record import Attempt, IterationRecord
from tasks.runs.run_state import record_at
from tasks.score_rollouts import score_rollouts
from tasks.stages.context import RunContext
from tasks.stages.references import DatasetRef
from tasks.start_policy import start_policy
from tasks.update_policy import update_policy

StageName = Literal["generate", "score", "advantages", "update", "evaluate"]
STAGES: tuple[StageName, ...] = ("generate", "score", "advantages", "update", "evaluate")


def begin(context: RunContext, dataset: DatasetRef) -> IterationRecord:
    """Record 0: the policy that PPO starts from, and how good it is."""
    context.timings.iteration = 0
    checkpoint = start_policy(context, dataset)
    evaluation = evaluate_policy(context, checkpoint, dataset) if context.spec.dataset.evaluation else None
    made = Made(checkpoint=checkpoint, evaluation=evaluation)
    return commit_iteration(context, draft_record(context, made, dataset, None, Attempt()))


def run_stages(
    context: RunContext,
    dataset: DatasetRef,
    previous: IterationRecord,
    attempt: Attempt,
    *,
    given: IterationRecord | None = None,
    start: StageName = "generate",
) -> Made:
    """The iteration after `previous`; of the stages before `start`, what the record `given` has is taken."""
    number, restoration = previous.iteration + 1, previous.restoration()
    context.timings.iteration = number

    def taken(name: StageName, ref: ArtifactRef | None) -> bool:
        return ref is not None and STAGES.index(name) < STAGES.index(start)

    if given is not None and taken("generate", given.rollouts):
        rollouts = given.rollouts
    else:
        rollouts = generate_rollouts(
            context,
            previous.checkpoint,
            dataset,
            iteration=number,
            position=previous.position,
            attempt=attempt.number,
        )
    if given is not None and taken("score", given.scores):
        scores = given.scores
    else:
        scores = score_rollouts(context, rollouts, dataset)
    if given is not None and taken("advantages", given.experience):
        experience = given.experience
    else:
        experience = compute_advantages(
            context,
            previous.checkpoint,
            previous.reference,
            rollouts,
            scores,
            kl_coef=previous.next_kl_coef,
            restoration=restoration,
        )
    if given is not None and taken("update", given.checkpoint):
        checkpoint = given.checkpoint
    else:
        checkpoint = update_policy(
            context,
            previous.checkpoint,
            experience,
            dataset,
            iteration=number,
            rate_factor=attempt.rate_factor,
            full=given.checkpoint.full if given is not None else writes_full(context.spec, number),
            restoration=restoration,
        )
    evaluated = given is not None and given.evaluation is not None  # perhaps only as the last one, then
    due = evaluated or evaluates_at(context.spec, number)
    evaluation = evaluate_policy(context, checkpoint, dataset) if due else None
    return Made(checkpoint, rollouts, scores, experience, evaluation)


def iterate(
    context: RunContext,
    console: RunConsole,
    dataset: DatasetRef,
    previous: IterationRecord,
    *,
    given: IterationRecord | None = None,
    start: StageName = "generate",
) -> IterationRecord:
    """One iteration, from the record before to its own; after a rollback, the earlier record to go on from."""
    check_disk(context, previous)
    attempt = current_attempt(context, previous.iteration + 1)
    try:
        made = run_stages(context, dataset, previous, attempt, given=given, start=start)
    except EngineError as error:
        complaint = not_finite(error)
        if complaint is None:
            raise
        return gone_wrong(context, console, previous.iteration + 1, [complaint], None)
    draft = draft_record(context, made, dataset, previous, attempt)
    passed = [str(violation) for violation in passed_limits(context, draft)]
    if passed and context.spec.guards.on_divergence == "warn":
        console.say(f"! iteration {draft.iteration}: {'; '.join(passed)}; going on, as guards.on_divergence=warn says")
        draft = draft.model_copy(update={"violations": passed})
    elif passed:
        return gone_wrong(context, console, draft.iteration, passed, draft)
    return commit_iteration(context, draft)


def gone_wrong(
    context: RunContext, console: RunConsole, iteration: int, passed: list[str], draft: IterationRecord | None
) -> IterationRecord:
    """Keep the evidence, then go back to an earlier record, or raise DivergedError."""
    evidence = keep_evidence(context, iteration, passed, draft)
    if context.spec.guards.on_divergence != "rollback":
        raise diverged(context.run, iteration, passed, evidence)
    after = roll_back(context, iteration, passed)
    if after is None:
        spent = f"It was rolled back {context.spec.guards.max_rollbacks} times (guards.max_rollbacks) before. "
        raise diverged(context.run, iteration, passed, evidence, spent)
    attempt = current_attempt(context, after + 1)
    count = f"rollback {attempt.number} of {context.spec.guards.max_rollbacks}"
    console.say(
        f"! iteration {iteration} diverged: {'; '.join(passed)} (evidence: {evidence}); {count}: back to iteration "
        f"{after}, with other samples and learning rates times {attempt.rate_factor:g}"
    )
    context.timings.restart()
    return record_at(context.records, after)


def writes_full(spec: RunSpec, iteration: int) -> bool:
    """Whether an iteration writes critic and optimizers too: every so often, and at the end."""
    return iteration % spec.checkpoint.every == 0 or iteration == spec.iterations


def evaluates_at(spec: RunSpec, iteration: int) -> bool:
    """Whether an iteration ends with an evaluation: every so often, and at the end."""
    due = iteration % spec.evaluation.every == 0 or iteration == spec.iterations
    return due and spec.dataset.evaluation is not None
