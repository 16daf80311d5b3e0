"""Proof that a policy is what its record says: iterations are done again from what they started from.

record k-1 and the record k ─► each stage of iteration k, in fresh engines and a scratch store ─► the same digest?
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from flows.console import RunConsole
from tasks.compute_advantages import compute_advantages
from tasks.evaluate_policy import evaluate_policy
from tasks.generate_rollouts import generate_rollouts
from tasks.prefect.flow_tags import also_tag, tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.run_state import record_at, with_changes
from tasks.runs.verification import Comparison, check_recorded, chosen_iterations, compared, open_verification
from tasks.score_rollouts import score_rollouts
from tasks.stages.context import RunContext
from tasks.start_policy import start_policy
from tasks.update_policy import update_policy


class VerifyReport(BaseModel):
    """Every comparison up to the first that differs."""

    model_config = ConfigDict(frozen=True)

    run: str
    comparisons: list[Comparison]

    @property
    def first_difference(self) -> Comparison | None:
        """The stage that gave other bytes than recorded; None where all are the same."""
        return next((found for found in self.comparisons if not found.same), None)


def verify(run: str, iterations: str | None = None, folder: str | None = None) -> VerifyReport:
    """Make iterations of a run again and compare, up to the first difference.

    Args:
        run: Name of the run
        iterations: FIRST..LAST or one number; without it, all
        folder: Where the spec's folder (data, reward functions) is now, if it has moved
    """
    console = RunConsole(run, 0)
    with console, open_verification(run, folder, console.progress) as context:
        also_tag(context.spec.name)
        chosen = chosen_iterations(context.records, iterations)
        found: list[Comparison] = []
        for iteration in chosen:
            record = record_at(context.records, iteration)
            then = context.with_spec(with_changes(context.spec, record.changed))
            for comparison in verify_iteration(then, record):
                found.append(comparison)
                verdict = "same" if comparison.same else f"DIFFERS: {comparison.found[:12]}"
                console.say(f"iteration {iteration}: {comparison.stage} {comparison.recorded[:12]} {verdict}")
                if not comparison.same:
                    return VerifyReport(run=run, comparisons=found)
        return VerifyReport(run=run, comparisons=found)


def verify_iteration(context: RunContext, record: IterationRecord) -> Iterator[Comparison]:
    """The stages of one iteration, each from its recorded inputs; first, that these are what was recorded."""
    check_recorded(context, record)
    number, dataset = record.iteration, record.dataset
    context.timings.iteration = number
    yield compared(number, "prepare_dataset", dataset, prepare_dataset(context))
    if number == 0:
        yield compared(0, "start_policy", record.checkpoint, start_policy(context, dataset))
    else:
        yield from verify_update(context, record, record_at(context.records, number - 1))
    if record.evaluation is not None:
        evaluation = evaluate_policy(context, record.checkpoint, dataset)
        yield compared(number, "evaluate_policy", record.evaluation, evaluation)


def verify_update(context: RunContext, record: IterationRecord, previous: IterationRecord) -> Iterator[Comparison]:
    """Rollouts, scores, experience and the update."""
    number, dataset, restoration = record.iteration, record.dataset, previous.restoration()
    assert record.rollouts is not None
    assert record.scores is not None
    assert record.experience is not None
    rollouts = generate_rollouts(
        context,
        previous.checkpoint,
        dataset,
        iteration=number,
        position=previous.position,
        attempt=record.attempt,
    )
    yield compared(number, "generate_rollouts", record.rollouts, rollouts)
    yield compared(number, "score_rollouts", record.scores, score_rollouts(context, record.rollouts, dataset))
    experience = compute_advantages(
        context,
        previous.checkpoint,
        previous.reference,
        record.rollouts,
        record.scores,
        kl_coef=previous.next_kl_coef,
        restoration=restoration,
    )
    yield compared(number, "compute_advantages", record.experience, experience)
    checkpoint = update_policy(
        context,
        previous.checkpoint,
        record.experience,
        dataset,
        iteration=number,
        rate_factor=record.rate_factor,
        full=record.checkpoint.full,
        restoration=restoration,
    )
    yield compared(number, "update_policy", record.checkpoint, checkpoint)


verify_run: EmbeddedFlow[[str, str | None, str | None], VerifyReport] = EmbeddedFlow(
    fn=verify,
    name="verify-run",
    flow_run_name="verify-{run}",
    description="Make iterations of a run again from their recorded inputs and compare digests, stage by stage.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
