"""Repairing what `tasks.runs.fsck` has found.

spec ◄── the copy in record 0        records from the damaged one on ──► out of the run; `resume` makes them again
notes of rollbacks ◄── the records
artifacts ◄── made again from their inputs, to the recorded digest        copy of the best policy ◄── the store
"""

from __future__ import annotations

from collections.abc import Iterator

from flows.console import RunConsole
from flows.ppo import finish_interrupted
from flows.recovery import mend
from infra.artifacts import ArtifactRef
from tasks.prefect.crashed_runs import holder_note
from tasks.prefect.flow_tags import also_tag, tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.register_policy import export_best, usable_best
from tasks.runs.errors import FAILURES, PrefectServerError, StoreUnavailable
from tasks.runs.findings import Findings
from tasks.runs.repair import repair_records, set_aside
from tasks.runs.run_state import effective_spec, last_record, spec_to_go_on
from tasks.stages.context import RunContext, open_run_context

OF_RECORDS = ("spec", "records", "notes")
UNREACHABLE = (PrefectServerError, StoreUnavailable)
"""For no run it would go better now."""
Wanted = list[tuple[int, ArtifactRef]]


def repair(found: Findings, folder: str | None = None) -> list[str]:
    """Repair what can be; what was done, in lines for people."""
    done = set_aside(found)
    if found.run is None:
        return done
    try:
        done += repair_run(found.run, found, folder)  # what was done before an error is told too
    except UNREACHABLE:
        raise
    except FAILURES as error:  # of another run it may go better
        done.append(f"run {found.run}: not repaired: {error}")
    return done


def repair_run(run: str, found: Findings, folder: str | None = None) -> Iterator[str]:
    """Repair what can be of a run, and say what was done. Raises what a start of the run raises, such as LeaseHeld."""
    if any(damage.repair in OF_RECORDS for damage in found.damages):
        yield from repair_records(run)
    damaged = [(damage.iteration, damage.ref) for damage in found.to_repair("artifact") if damage.ref is not None]
    if damaged or found.to_repair("copy"):
        in_order = sorted(damaged, key=lambda one: (one[0], one[1].kind == "checkpoint"))
        yield from repair_artifacts(run, [(iteration, ref.bare()) for iteration, ref in in_order], folder)


def remake_damaged(run: str, damaged: Wanted, folder: str | None = None) -> list[str]:
    """Make damaged artifacts of a run again from their inputs, and the copy of its best policy.

    Args:
        run: Name of the run
        damaged: The artifacts, each with its iteration
        folder: Where the spec's folder (data, reward functions) is now, if it has moved
    """
    console, spec = RunConsole(run, 0), spec_to_go_on(run, folder)
    also_tag(spec.name)
    opened = open_run_context(RunContext, spec, run, console.progress, effective_spec, note=holder_note())
    with console, opened as context:
        finish_interrupted(context, console)
        return remake(context, console, damaged)


def remake(context: RunContext, console: RunConsole, damaged: Wanted) -> list[str]:
    """The same with what the tasks of a run work with."""
    done = []
    for iteration, ref in damaged:
        # A copy that this machine has kept of a remote store says nothing of that store.
        place = context.store.set_aside(ref.kind, ref.key, digest=ref.digest)
        again = mend(context, console, [(iteration, ref)]) is None
        verdict = "is undamaged again, with the same digest" if again else "could not be made again to the same digest"
        left = f"; what was there is in {place} now" if place and not again else ""
        done.append(f"{ref.kind} of iteration {iteration} {verdict}{left}")
    last = last_record(context.records)
    if last is not None:
        done.append(f"the best policy is copied to {export_best(context, usable_best(context, last))}")
    return done


repair_artifacts: EmbeddedFlow[[str, Wanted, str | None], list[str]] = EmbeddedFlow(
    fn=remake_damaged,
    name="fsck-repair",
    flow_run_name="repair-{run}",
    description="Make damaged artifacts of a run again from their inputs.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
