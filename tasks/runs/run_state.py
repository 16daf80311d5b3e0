"""Where a run stands: nothing yet, or after its last committed iteration. And which spec it really has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from infra.artifacts import ArtifactError, ArtifactRef, ArtifactStore, open_store
from infra.backend import open_collector, open_records, open_runs
from infra.runs.names import is_run_name
from infra.runs.records import RunRecords
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec, Section, SpecError, differing_keys, validated
from tasks.runs.iteration_record import IterationRecord, read_record, resume_inputs
from tasks.runs.kept import FLOWS, pages_of
from tasks.runs.notes import ROLLBACKS, Rollback, noted_changes, pending_rerun, reruns_of
from tasks.runs.record_chain import MAY_CHANGE, Chain, read_chain, spec_document, unless_changed, with_values
from tasks.stages.holding import DPO, PRIVATE, REWARD_MODEL, RLHF, lease_name
from tasks.stages.hub_names import with_commits

NOT_KEPT = "is not kept (checkpoint.keep_last, keep_every)"


def recorded_spec(records: RunRecords) -> RunSpec | None:
    """The spec that a run was started with, its folder included; None for a new run."""
    document = spec_document(records)
    return None if document is None else read_spec(document, records.run)


def read_spec(document: Mapping[str, Any], run: str) -> RunSpec:
    """The spec that a run's records hold. Raises SpecError where this version refuses it."""
    try:
        return validated(RunSpec, document)
    except SpecError as error:
        raise SpecError(
            f"the spec that run {run} was started with is refused by this version: use the version of ppoflow that "
            f"started it, or train under another name with what is right now\n{error}"
        ) from None


def spec_of_run(run: str, folder: str | None = None) -> RunSpec:
    """The spec of a run that exists. `folder`: where its sources are now, if they have moved.

    Raises InputError where there is no such run, naming those there are.
    """
    root = open_store(Settings().store_root).root
    spec = recorded_spec(open_records(root, run))
    if spec is None:
        raise no_such_run(run, root)
    return spec if folder is None else spec.model_copy(update={"folder": folder})


def spec_to_go_on(run: str, folder: str | None = None) -> RunSpec:
    """The spec of a run that exists, with the changes that it goes on with, such as more iterations."""
    spec, records = spec_of_run(run, folder), open_records(open_store(Settings().store_root).root, run)
    chain = read_chain(records).records
    return with_changes(spec, changes_after(records, chain[-1] if chain else None))


def changes_after(records: RunRecords, last: IterationRecord | None) -> Mapping[str, Any]:
    """What has changed of the spec that a run began with, after its last record: what that one was made with (nothing
    where a fork took it from its source), unless later records were taken out."""
    noted = noted_changes(records, -1 if last is None else last.iteration)
    if noted is not None or last is None:
        return noted or {}
    return {} if last.forked_from is not None else last.changed


def no_such_run(run: str, root: str, known: Iterable[str] | None = None) -> InputError:
    """The refusal of a run, naming those that are known: without any given, those that have a record."""
    if (only := made_by_preferences(run, root)) is not None:
        return InputError(only)
    names = ", ".join(open_runs(root).names() if known is None else known) or "none"
    return InputError(
        f"there is no run {run} in {root} (runs there: {names}): check the name; where it was ended before its first "
        "record, give its ppoflow train command again"
    )


def made_by_preferences(run: str, root: str) -> str | None:
    """What to say of a run that learned from preferences alone, and so has no iterations; None for any other name."""
    page = next((page for page in pages_of(root, *FLOWS) if page.run == run), None)
    return None if page is None else f"run {run} has no iterations: {page.command} made it, and goes on with it"


def command_again(run: str, root: str) -> str | None:
    """What goes on with a run that was ended before its first record; None where no process ever had it."""
    names = open_runs(root).names(started=False)
    for flow in (RLHF, DPO, REWARD_MODEL):
        if lease_name(flow, run) in names:
            return f"ppoflow {flow} SPEC --run {run}"
    if run not in names:
        return None
    begun = open_records(root, run).read_spec() is not None
    return f"ppoflow resume {run}" if begun else f"ppoflow train SPEC --run {run}"


def known_runs(root: str) -> list[str]:
    """The runs that have records, or a lease of their own name, or pages of what they learned from preferences."""
    runs = open_runs(root)
    names = {name for name in runs.names(started=False) if not name.startswith(PRIVATE)} | {*runs.names()}
    return sorted(names | {page.run for page in pages_of(root) if is_run_name(page.run)})


def require_store() -> None:
    """Raise InputError where nothing is stored at all, as where a setting names another place than was meant."""
    root = open_store(Settings().store_root).root
    collector = open_collector(root)
    if not known_runs(root) and not any((collector.artifacts(), collector.orphans(), collector.damaged())):
        raise InputError(
            f"{root} has no run and no artifact: set PPOFLOW_STORE (or PPOFLOW_HOME) to where the runs are"
        )


def has_all(spec: RunSpec, record: IterationRecord | None) -> bool:
    """Whether the last record of a run is that of the last iteration which its spec asks for."""
    return record is not None and record.iteration >= spec.iterations


def is_done(spec: RunSpec, run: str) -> bool:
    """Whether a run of the store has all iterations that a spec asks for."""
    return has_all(spec, last_record(open_records(open_store(Settings().store_root).root, run)))


def restore_lost(records: RunRecords) -> list[str]:
    """Write a lost spec again, from the copy in the run's first record, and lost notes of rollbacks; what was lost."""
    chain = read_chain(records, notes=True)
    note_again(records, chain.lost_rollbacks)
    said = [
        f"the note of the rollback of run {records.run} to iteration {one.after} was lost; it is written again from "
        "the run's records"
        for one in chain.lost_rollbacks
    ]
    if chain.spec_is_lost and chain.spec is not None:
        records.restore_spec(chain.spec)
    if chain.lost_last is not None:
        said.append(f"{chain.lost_last.complaint}: it is made again, from the stages that are still in the store")
    if chain.spec_is_lost:
        said.append(f"the spec of run {records.run} was lost; it is restored from the run's first record")
    return said


def note_again(records: RunRecords, rollbacks: Iterable[Rollback]) -> None:
    """Write notes of rollbacks that were lost."""
    for one in rollbacks:
        records.note(ROLLBACKS, one.model_dump(mode="json"))


def effective_spec(spec: RunSpec, records: RunRecords) -> RunSpec:
    """The spec a run really has: learning-rate decay ends where the run was first meant to end, and names of the hub
    stand for the commits that they were then; a new run's for today's.

    Raises InputError when the run exists with another spec, listing the keys that differ, RecordError where its records
    are damaged, and HubError or HubUnavailable where the hub was asked in vain.
    """
    document = read_chain(records, notes=True).spec
    recorded = None if document is None else read_spec(document, records.run)
    decay = spec.update.decay_iterations or spec.iterations
    if recorded is not None and spec.update.decay_iterations is None:
        decay = recorded.update.decay_iterations or recorded.iterations
    resolved = spec.model_copy(update={"update": spec.update.model_copy(update={"decay_iterations": decay})})
    if recorded is None:
        return with_commits(resolved)
    found = {"hub_commits": [one.model_dump() for one in recorded.hub_commits]}
    refuse_other_spec(records.run, recorded.document(), {**resolved.document(), **found})
    return with_commits(resolved, recorded.hub_commits)


def refuse_other_spec(run: str, recorded: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise InputError naming every key that differs and may not."""
    keys = [line for line in differing_keys(recorded, requested) if not line.startswith(MAY_CHANGE)]
    if keys:
        listed = "\n  ".join(keys)
        tail = rf"/runs/{re.escape(run)}/"
        moved = re.search(rf"'(/[^']*){tail}([^']*)'.* -> .*'(?!\1/)/[^']*{tail}\2'", listed)
        own = f"its own models lie below PPOFLOW_HOME={moved[1]}: set it so here too; else " if moved else ""
        raise InputError(
            f"run {run} exists with another spec (recorded -> requested):\n  {listed}\n{own}"
            "choose another --run name, or restore these keys; to continue with other settings: "
            f"ppoflow fork {run}@ITERATION NEW --set …"
        )


def changed_values(recorded: RunSpec, now: RunSpec) -> dict[str, Any]:
    """The keys that have other values now than recorded, as far as they may change, by their dotted names."""
    before, after = fields_of(recorded), fields_of(now)
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


def fields_of(section: Section, prefix: str = "") -> dict[str, Any]:
    """The fields of a spec by their dotted names, as JSON. One that holds a mapping of the user's is one value."""
    document = section.model_dump(mode="json", exclude={"folder"})
    fields: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            fields |= fields_of(value, f"{prefix}{name}.")
        elif name in document:
            fields[f"{prefix}{name}"] = document[name]
    return fields


def with_changes(spec: RunSpec, changed: Mapping[str, Any]) -> RunSpec:
    """The spec with these values by dotted names."""
    return RunSpec.model_validate(with_values(spec.model_dump(mode="json"), changed))


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    leaves: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def last_record(records: RunRecords) -> IterationRecord | None:
    """The record of the last committed iteration, None for a new run."""
    last = records.last()
    return None if last is None else read_record(records.read(last))


def record_at(records: RunRecords, iteration: int) -> IterationRecord:
    """The record of one iteration."""
    return read_record(records.read(iteration))


def committed(run: str, *, notes: bool = False) -> Chain:
    """See `read_chain`. Raises InputError for a run without records, naming the runs that there are."""
    root = open_store(Settings().store_root).root
    chain = read_chain(open_records(root, run), notes=notes)
    if not chain.links:
        if chain.lost_last is not None:
            raise chain.lost_last
        if chain.spec is None:
            raise no_such_run(run, root)
        raise InputError(
            f"run {run} has no committed iteration in {root} yet: wait for its first (`ppoflow status {run}`), or "
            f"continue it with  ppoflow resume {run}"
        )
    return chain


def committed_at(run: str, iteration: int | None) -> IterationRecord:
    """The record of an iteration (None: the best), all of the run's checked. Raises InputError where there is none."""
    records = committed(run).records
    if iteration is None:
        return records[records[-1].best.iteration]
    if not 0 <= iteration < len(records):
        raise InputError(f"run {run} has no iteration {iteration}: it has 0..{len(records) - 1}")
    return records[iteration]


def require_rerunnable(run: str, iteration: int, flow_run: str | None = None) -> None:
    """Raise InputError where a run has no record of an iteration that is to be done again, or no more what it started
    from.

    It needs none where that rerun was broken off, or was begun by this same flow run.
    """
    records = open_records(open_store(Settings().store_root).root, run)
    pending = unless_changed(records, lambda _: pending_rerun(records))
    known = [] if flow_run is None else [one.iteration for one in reruns_of(records) if one.flow_run == flow_run]
    if iteration not in (*known, *([] if pending is None else [pending.iteration])):
        committed_at(run, iteration)
        require_start(committed(run).records, iteration, "rerun")


def require_start(records: list[IterationRecord], iteration: int, what: str) -> None:
    """Raise InputError where retention has let go what an iteration of a run starts from, to `verify` or `rerun` it.

    A rerun makes the checkpoint before it again, where the store has what that one starts from.
    """
    if iteration == 0 or (gone := not_kept(records[iteration - 1])) is None:
        return
    if what == "rerun" and iteration > 1 and not_kept(records[iteration - 2]) is None:
        return
    raise InputError(
        f"iteration {iteration} of run {records[0].run} starts from the {gone.kind} of iteration {iteration - 1}, "
        f"which {NOT_KEPT}: {what} an iteration that comes after one that is"
    )


def not_kept(record: IterationRecord, store: ArtifactStore | None = None) -> ArtifactRef | None:
    """The first of what going on from this record needs that the store does not have; what is damaged is there."""
    store = store or open_store(Settings().store_root)
    for _, ref in resume_inputs(record):
        with suppress(ArtifactError):
            if store.find(ref.kind, ref.key) is None:
                return ref
    return None


def first_record(records: RunRecords) -> IterationRecord:
    """Record 0: the policy that PPO started from."""
    return record_at(records, 0)
