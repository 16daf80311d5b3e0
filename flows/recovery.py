"""Going on from what is undamaged: damaged artifacts are made again from their inputs, or the run falls back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flows.console import RunConsole
from flows.iteration import make
from flows.stages import run_stages
from infra.artifacts import ArtifactError, ArtifactRef
from ppo_core.spec import RunSpec
from tasks.prefect.crashed_runs import mark_crashed
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.errors import EngineError
from tasks.runs.iteration_record import IterationRecord, resume_inputs
from tasks.runs.retention import remove_orphans
from tasks.runs.run_state import last_record, record_at, recorded_spec, with_changes
from tasks.set_aside_damaged import set_aside_damaged
from tasks.stages.context import RunContext
from tasks.stages.dataset_job import dataset_job
from tasks.stages.download_source import download_sources
from tasks.stages.engines import asked_for
from tasks.stages.holding import Lease
from tasks.stages.hub_names import DOWNLOAD
from tasks.stages.references import DatasetRef
from tasks.stages.table import EVALUATE_POLICY, ITERATION

MIB = 2**20
IN_RESULTS = frozenset({"deterministic", "kv_cache_gib", "tensor_parallel_size"})
"""What jobs carry of a spec's `engines`. No result depends on the rest: where they run, how many, their timeouts."""


def close_dead_pages(lease: Lease, console: RunConsole) -> None:
    """Have Prefect's pages say that the processes died which had this lease before."""
    for name in mark_crashed(lease.predecessors):
        console.say(f"flow run {name} had died; Prefect now shows it as Crashed")


def clean_up(context: RunContext, console: RunConsole) -> None:
    """Have Prefect's pages say which holders of the run died, and remove what dead processes left half written."""
    if context.lease is not None:
        close_dead_pages(context.lease, console)
    if freed := remove_orphans(context):
        console.say(f"removed leftovers of dead processes from the store: {freed / MIB:.1f} MiB")


def tell_other_data(context: RunContext, console: RunConsole, dataset: DatasetRef) -> None:
    """Say so where the dataset is not what the last record was made with, although its spec asked for the same."""
    last = last_record(context.records)
    if last is None or last.dataset.digest == dataset.digest:
        return
    if dataset_job(spec_at(context, last)).model_dump() != dataset_job(context.spec).model_dump():
        return  # a fork that asks for other data
    before, now = last.dataset.in_words(), dataset.in_words()
    differs = f"{before} then, {now} now" if before != now else f"{now}, as then, in other bytes"
    epoch, index = divmod(last.position, dataset.counts["train"])
    console.say(
        f"! the dataset is not that of iteration {last.iteration} ({differs}): continuing with the new one at epoch "
        f"{epoch}, prompt {index}; for the old one end the run, and restore the files (or the version of ppoflow) of "
        "that time"
    )


def last_resumable_record(context: RunContext, console: RunConsole) -> IterationRecord | None:
    """The last record of which all that going on needs is undamaged, after making again what can be; None: none is.

    Records after it are taken out of the run, and their iterations done again.
    """
    last = last_record(context.records)
    if last is None:
        return None
    lost: set[str] = set()
    for iteration in reversed(range(last.iteration + 1)):
        record = record_at(context.records, iteration)
        if lost & {ref.digest for _, ref in resume_inputs(record)}:
            continue
        missing = mend(context, console, resume_inputs(record, best=True))
        if missing is not None and missing.digest not in {ref.digest for _, ref in resume_inputs(record)}:
            console.say("! the best policy is lost; the best remaining one takes its place")
            missing = mend(context, console, resume_inputs(record))
        if missing is not None:
            lost.add(missing.digest)
            continue
        if iteration < last.iteration:
            context.supersede(iteration)
            console.say(f"! falling back to iteration {iteration}, the last undamaged one; later ones are made again")
        return record
    context.supersede(-1)
    console.say("! no iteration is undamaged: the run starts over")
    return None


def mend(context: RunContext, console: RunConsole, needs: Iterable[tuple[int, ArtifactRef]]) -> ArtifactRef | None:
    """Make again what is damaged of `needs` (artifacts, each with its iteration), to the same digest.

    None once nothing is damaged, else the first that could not be made again.
    """
    for iteration, ref in needs:
        complaint = set_aside_damaged(context, ref)
        if complaint is None:
            continue
        console.say(f"! {complaint}; making it again")
        if not remake(context, console, iteration, ref):
            console.say(f"! {ref.kind} of iteration {iteration} could not be made again to the same digest")
            return ref
        console.say(f"{ref.kind} of iteration {iteration} is undamaged again, with the same digest")
    return None


def remake(context: RunContext, console: RunConsole, iteration: int, ref: ArtifactRef) -> bool:
    """Run the stages of an iteration that `ref` needs; the latest ones first, earlier ones where those do not do."""
    record = record_at(context.records, iteration)
    with at_its_time(context, record) as then:
        try:
            return remake_then(then, record, ref)
        except EngineError as error:
            lost = context.lease is not None and context.lease.lost
            if lost or asked_for(then.spec) == asked_for(context.spec):
                raise
            console.say(f"! the engines of iteration {iteration} cannot be had here any more: {error}")
            return False


def remake_then(then: RunContext, record: IterationRecord, ref: ArtifactRef) -> bool:
    """See `remake`; `then` has the spec of that time."""
    download_sources(then)
    if ref.kind == DOWNLOAD:
        return set_aside_damaged(then, ref) is None
    dataset = prepare_dataset(then)
    if record.iteration == 0:
        run_stages(then, dataset, None, {}, evaluate=ref.kind == EVALUATE_POLICY.kind)
        return set_aside_damaged(then, ref) is None
    previous = record_at(then.records, record.iteration - 1)
    for stage in reversed(ITERATION[: ITERATION.index(EVALUATE_POLICY)]):
        try:
            make(then, dataset, previous, record.attempt_settings, again=record, start=stage.label)
        except ArtifactError:
            continue
        if set_aside_damaged(then, ref) is None:
            return True
    return False


@contextmanager
def at_its_time(context: RunContext, record: IterationRecord) -> Iterator[RunContext]:
    """The same means under a record's spec and with the engines that it asks for; afterwards those of now again."""
    then = context.with_spec(spec_at(context, record))
    then.engines.serve(then.spec)
    try:
        yield then
    finally:
        context.engines.serve(context.spec)


def spec_at(context: RunContext, record: IterationRecord) -> RunSpec:
    """The spec that the record was made with; some of it may have been changed since.

    Where its folder is, and where engines run, how many and their timeouts, is as now: the cluster of that time may be
    gone, and no result depends on that.
    """
    made_with, now = with_changes(recorded_spec(context.records) or context.spec, record.changed), context.spec
    engines = now.engines.model_copy(update=made_with.engines.model_dump(include=set(IN_RESULTS)))
    return made_with.model_copy(update={"folder": now.folder, "engines": engines})
