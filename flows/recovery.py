"""Going on from what is undamaged: damaged artifacts are made again from their inputs, or the run falls back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from flows.console import RunConsole
from flows.iteration import Rerun, iterate, made_before, make
from flows.stages import run_stages
from infra.artifacts import ArtifactError, ArtifactRef
from ppo_core.spec import RunSpec
from tasks.prefect.crashed_runs import mark_crashed
from tasks.prepare_dataset import prepare_dataset
from tasks.runs.errors import EngineError, InputError
from tasks.runs.guards import take_out
from tasks.runs.iteration_record import IterationRecord, read_record, resume_inputs
from tasks.runs.notes import NotedRerun, end_rerun, note_rerun, pending_rerun, reruns_of
from tasks.runs.retention import remove_orphans
from tasks.runs.run_state import last_record, record_at, recorded_spec, with_changes
from tasks.set_aside_damaged import set_aside_damaged
from tasks.stages.context import RunContext
from tasks.stages.dataset_job import dataset_job
from tasks.stages.download_source import download_sources
from tasks.stages.engines import asked_for
from tasks.stages.find_verified import pin_all
from tasks.stages.holding import Lease
from tasks.stages.hub_names import DOWNLOAD
from tasks.stages.references import DatasetRef
from tasks.stages.table import EVALUATE_POLICY, GENERATE_ROLLOUTS, ITERATION

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
            take_out(context, iteration)
            console.say(f"! falling back to iteration {iteration}, the last undamaged one; later ones are made again")
        return record
    take_out(context, -1)
    console.say("! no iteration is undamaged: the run starts over")
    return None


def rerun_iterations(
    context: RunContext,
    console: RunConsole,
    dataset: DatasetRef,
    record: IterationRecord | None,
    asked: Rerun | None,
    show: Callable[[IterationRecord], None],
    *,
    flow_run: str | None = None,
) -> IterationRecord | None:
    """Finish the rerun that a dead process has noted, then do the one `asked` for; the record to go on from.

    Not asked for is what has just been finished, nor what `flow_run`, being started again, had begun before.
    """
    noted, pending = reruns_of(context.records), pending_rerun(context.records)
    known = [one for one in noted if flow_run is not None and one.flow_run == flow_run]
    if pending is not None:
        known.append(pending)
        given = read_record(pending.record or {})
        if can_start(context, console, given, pending.start):
            record = do_again(context, console, dataset, pending, given, show)
        else:
            end_rerun(context.records, pending)
            console.say(f"! the rerun of iteration {pending.iteration} is given up: what it starts from is damaged")
    elif noted and not noted[-1].ended:
        end_rerun(context.records, noted[-1])  # its process died after it was done
    if asked is None or (asked.iteration, asked.start) in ((one.iteration, one.start) for one in known):
        return record
    given = record_at(context.records, asked.iteration)
    if not can_start(context, console, given, asked.start):
        raise InputError(f"iteration {asked.iteration} cannot be done again: what it starts from cannot be had")
    note = note_rerun(context.records, asked.iteration, asked.start, flow_run)
    record = do_again(context, console, dataset, note, given, show)
    if record.iteration == note.iteration:
        tell_cached(console, record, note.start)
    return record


def can_start(context: RunContext, console: RunConsole, given: IterationRecord, start: str) -> bool:
    """Whether all is undamaged, or was made again, that an iteration with the record `given` is done again from."""
    taken = [(given.iteration, ref) for ref in made_before(given, start).values()]
    pin_all(context, [ref for _, ref in taken])
    needs = [*resume_inputs(record_at(context.records, given.iteration - 1)), *taken]
    return mend(context, console, needs, taken_out=given) is None


def do_again(
    context: RunContext,
    console: RunConsole,
    dataset: DatasetRef,
    note: NotedRerun,
    given: IterationRecord,
    show: Callable[[IterationRecord], None],
) -> IterationRecord:
    """Take an iteration and those after it out of the run, where they are in it, and do it again from a stage on."""
    previous = record_at(context.records, note.iteration - 1)
    replaced = take_out(context, previous.iteration) or "what a process that died took out"
    console.say(f"rerunning iteration {note.iteration} from stage {note.start}; taken out of the run: {replaced}")
    record = iterate(context, console, dataset, previous, again=given, start=note.start)
    end_rerun(context.records, note)
    if record.iteration == note.iteration:
        show(record)
    return record


def tell_cached(console: RunConsole, record: IterationRecord, start: str) -> None:
    """Say so where the stage that was to be done again came from the store: its key is what it was."""
    asked = next(stage for stage in ITERATION if stage.label == start)
    if asked.name in record.cached_stages:
        console.say(
            f"! stage {start} of iteration {record.iteration} was found in the store and not computed again: nothing "
            "that its key names has changed. What a reward server answers, and files that a reward opens, are not in it"
        )


def mend(
    context: RunContext,
    console: RunConsole,
    needs: Iterable[tuple[int, ArtifactRef]],
    *,
    taken_out: IterationRecord | None = None,
) -> ArtifactRef | None:
    """Make again what is damaged of `needs` (artifacts, each with its iteration), to the same digest.

    None once nothing is damaged, else the first that could not be made again. `taken_out`: a record that tells how
    its iteration was made, and may be no part of the run any more.
    """
    for iteration, ref in needs:
        complaint = set_aside_damaged(context, ref)
        if complaint is None:
            continue
        console.say(f"! {complaint}; making it again")
        known = taken_out if taken_out is not None and taken_out.iteration == iteration else None
        if not remake(context, console, known or record_at(context.records, iteration), ref):
            console.say(f"! {ref.kind} of iteration {iteration} could not be made again to the same digest")
            return ref
        console.say(f"{ref.kind} of iteration {iteration} is undamaged again, with the same digest")
    return None


def remake(context: RunContext, console: RunConsole, record: IterationRecord, ref: ArtifactRef) -> bool:
    """Run the stages of an iteration that `ref` needs; the latest ones first, earlier ones where those do not do."""
    with at_its_time(context, record) as then:
        try:
            return remake_then(then, record, ref)
        except EngineError as error:
            lost = context.lease is not None and context.lease.lost
            if lost or asked_for(then.spec) == asked_for(context.spec):
                raise
            console.say(f"! the engines of iteration {record.iteration} cannot be had here any more: {error}")
            return False


def remake_then(then: RunContext, record: IterationRecord, ref: ArtifactRef) -> bool:
    """See `remake`; `then` has the spec of that time."""
    download_sources(then)
    if ref.kind == DOWNLOAD:
        return set_aside_damaged(then, ref) is None
    dataset = prepare_dataset(then)
    if record.iteration == 0:
        # Nothing is sampled at the start but the answers that are evaluated.
        evaluate = ref.kind in (EVALUATE_POLICY.kind, GENERATE_ROLLOUTS.kind)
        run_stages(then, dataset, None, {}, evaluate=evaluate)
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
