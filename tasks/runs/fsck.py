"""Whether everything that runs have stored is there, byte for byte, and what can be made again where it is not.

`verify` proves that bytes follow from their inputs; this reads them. It writes nothing, and runs may write meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from infra.artifacts import ArtifactCorrupted, ArtifactError, ArtifactMissing, ArtifactRef, ArtifactStore, open_store
from infra.artifacts.export import check_export
from infra.backend import open_collector, open_runs
from infra.runs.listing import RunListing
from infra.runs.local_records import LAST
from infra.runs.records import RecordError, RecordMissing, RunRecords, remedy_for
from infra.settings import Settings
from infra.storage.rereading import ChangedOnTheWay
from tasks.runs.derived import not_derived
from tasks.runs.findings import WRITTEN_LATER, Damage, Findings, check_notes, is_sound, of_last, of_record
from tasks.runs.iteration_record import (
    NEWER,
    ChainedRecord,
    IterationRecord,
    RecordsOfEarlierVersion,
    resume_inputs,
)
from tasks.runs.kept import FLOWS, Page, copies_of, each_once, pages_of
from tasks.runs.made_from import step_of
from tasks.runs.reachability import PROMOTED, Name, Promoted, Reachability, promised, unreadable_promotions
from tasks.runs.record_chain import check_last, first_break, link, record_digest
from tasks.runs.run_state import known_runs, no_such_run
from tasks.stages.table import BY_NAME

Progress = Callable[[str], None]
Artifact = tuple[str, str, str]
"""Kind, key and digest."""
RELEASED = {stage.kind for stage in BY_NAME.values() if not stage.kept}
"""What retention (checkpoint.keep_last) removes."""
REGISTERED_LOST = "put it back from a copy: a registered version is this policy; or delete that version, and its page"


def check_store(progress: Progress) -> Iterator[Findings]:
    """Everything: run by run, and then what belongs to none."""
    store = open_store(Settings().store_root)
    known, pages, seen, read = known_runs(store.root), pages_of(store.root), set[Artifact](), set[Name]()
    for run in known:
        found = read_run(store, run, pages, progress, seen)
        read |= found.names
        yield found
    read |= {(kind, key) for kind, key, _ in seen}
    yield check_rest(store, progress, read, [page for page in pages if page.run not in known])


def check_run(run: str, progress: Progress) -> Findings:
    """See `read_run`. Raises InputError for an unknown run."""
    store = open_store(Settings().store_root)
    known = known_runs(store.root)
    if run not in known:
        raise no_such_run(run, store.root, known)
    return read_run(store, run, pages_of(store.root), progress, set())


def read_run(store: ArtifactStore, run: str, pages: list[Page], progress: Progress, seen: set[Artifact]) -> Findings:
    """The records of a run, its pages, the artifacts that they need, and the copies of its models on this machine.

    Artifacts in `seen` are not read again; those that are found sound are added.
    """
    records = open_runs(store.root).records(run)
    while True:
        found = Findings(run)
        try:
            contents = records.contents()
        except (RecordError, ChangedOnTheWay, OSError) as error:
            found.damages.append(Damage("records", str(error), ""))
            break
        believed = check_records(records, contents, found)
        check_artifacts(store, believed, found, progress, seen)
        check_evidence(store, found, progress, seen)
        # A rollback, or retention, may have taken away what was missed: then look again.
        if not found.damages or records.contents() == contents:
            break
    check_pages(store, [page for page in pages if page.run == run], found, progress, seen)
    check_copies(run, found)
    found.leave_newer()
    return found


def check_records(records: RunRecords, contents: RunListing, found: Findings) -> list[IterationRecord]:
    """Every document of a run. Returns the records that can be believed."""
    run, links, suspects = records.run, dict[int, ChainedRecord](), list[int]()
    for iteration, mark in contents.iterations.items():
        try:
            (document,) = records.marked([mark])
            if document is not None:
                links[iteration] = link(run, document)
        except RecordsOfEarlierVersion as error:
            found.damages.append(Damage("records", str(error), ""))
            return []
        except WRITTEN_LATER as error:
            suspects.append(iteration)
            found.newer = True
            found.damages.append(Damage(f"record of iteration {iteration}", str(error), NEWER))
        except RecordError as error:
            suspects.append(iteration)
            found.damages.append(of_record(run, iteration, error))
        except (ChangedOnTheWay, OSError) as error:
            suspects.append(iteration)
            found.damages.append(Damage(f"record of iteration {iteration}", str(error), ""))
    found.records = len(links)
    found.releases = any(one.record.retention.keep_last is not None for one in links.values())
    readable = {number: one for number, one in links.items() if not suspects or number < suspects[0]}
    broken = first_break(run, list(readable), list(readable.values()))
    if broken is not None:
        suspects.append(broken[0])
        found.damages.append(of_record(run, *broken))
    believed = [one for number, one in readable.items() if not suspects or number < min(suspects)]
    try:
        if not suspects:
            check_last(records, contents, believed)
            check_named(records, contents, believed)
    except RecordError as error:
        found.damages.append(of_last(run, len(believed), error))
        believed = believed[: found.damages[-1].iteration]
    check_spec(records, believed, list(links.values()), found)
    check_notes(records, believed, found)
    return [one.record for one in believed]


def check_named(records: RunRecords, contents: RunListing, believed: list[ChainedRecord]) -> None:
    """Raise RecordMissing where nothing names the last record: if later ones are lost, nobody would know.

    Of a run with one record its writer may have died before it named that.
    """
    if contents.naming_last and contents.last is None and len(believed) > 1:
        raise RecordMissing(f"run {records.run} has lost {LAST}, which names its last record")


def check_spec(records: RunRecords, believed: list[ChainedRecord], links: list[ChainedRecord], found: Findings) -> None:
    """The spec of a run against the copy in its first record, which counts only where that record is believed."""
    copy = believed[0].record.spec if believed else None
    try:
        spec = records.read_spec()
        complaint = f"run {records.run} has lost its spec" if spec is None and links else None
    except (RecordError, ChangedOnTheWay, OSError) as error:
        spec, complaint = None, str(error)
        found.newer = found.newer or isinstance(error, WRITTEN_LATER)
    if spec is not None and copy is not None and record_digest(spec) != record_digest(copy):
        complaint = f"the spec of run {records.run} is not the one that its first record has"
    if complaint is None:
        return
    damage = Damage("spec", complaint, "put spec.json back from a copy; no record that can be believed has one")
    # Of a first record that no later one names, nothing says that it, and not the spec, is the right one.
    if copy is not None and (spec is None or len(believed) > 1):
        damage = replace(damage, remedy=remedy_for(records.run), repair="spec")
    found.damages.append(damage)


def check_artifacts(
    store: ArtifactStore, records: list[IterationRecord], found: Findings, progress: Progress, seen: set[Artifact]
) -> None:
    """Every byte of what records need, and what each artifact was made from."""
    last = {(ref.kind, ref.key) for _, ref in resume_inputs(records[-1], best=True)} if records else set()
    needs = Reachability(store)
    last |= needs.of_each(promised(records))
    named = needs.named(records)
    for iteration, ref in named:
        found.artifacts += 1
        artifact = (ref.kind, ref.key, ref.digest)
        if artifact in seen:
            continue
        progress(f"run {found.run}: {found.artifacts} of {len(named)} artifacts")
        # What only an earlier record needs to be gone on from, retention may have removed, if it does not promise it.
        released = found.releases and ref.kind in RELEASED and (ref.kind, ref.key) not in last
        remedy = f"`ppoflow fsck {found.run} --repair` makes it again from its inputs"
        damage = Damage(f"{ref.kind} of iteration {iteration}", "", remedy, "artifact", iteration, ref)
        if is_sound(store, found, ref, damage, may_be_gone=released):
            seen.add(artifact)
    check_lineage(store, records, found)


def check_evidence(store: ArtifactStore, found: Findings, progress: Progress, seen: set[Artifact]) -> None:
    """Every byte of what diverged iterations made, and made it from."""
    needs, by_records = Reachability(store), found.names
    for record in found.evidence:
        for _, ref in needs.named([record]):
            artifact = (ref.kind, ref.key, ref.digest)
            if artifact in seen or (ref.kind, ref.key) in by_records:
                continue
            found.artifacts += 1
            progress(f"run {found.run}: {found.artifacts} artifacts")
            what = f"{ref.kind} of iteration {record.iteration}, which diverged"
            remedy = "put it back from a copy; it is kept as evidence, and no iteration of the run depends on it"
            if is_sound(store, found, ref, Damage(what, "", remedy, ref=ref)):
                seen.add(artifact)


def check_pages(
    store: ArtifactStore, pages: list[Page], found: Findings, progress: Progress, seen: set[Artifact]
) -> None:
    """The pages of what was learned from preferences, and every byte of what they name."""
    named: list[tuple[ArtifactRef, Page]] = []
    for page in pages:
        try:
            named += [(ref, page) for ref in page.artifacts()]
            found.records += 1
        except (RecordError, ChangedOnTheWay, OSError) as error:
            found.damages.append(Damage(f"page {page.name} of {page.folder}", str(error), page.remedy))
    by_records = found.names
    for ref, page in each_once(store, named):
        found.artifacts += 1
        artifact = (ref.kind, ref.key, ref.digest)
        if artifact not in seen and (ref.kind, ref.key) not in by_records:
            progress(f"run {found.run}: {found.artifacts} artifacts")
            damage = Damage(f"{ref.kind} of run {page.run}", "", REGISTERED_LOST, ref=ref)
            if page.folder in FLOWS:
                damage = replace(damage, remedy=f"{page.command} makes it again", repair="set aside")
            if is_sound(store, found, ref, damage):
                seen.add(artifact)


def check_lineage(store: ArtifactStore, records: list[IterationRecord], found: Findings) -> None:
    """That each artifact, as far as it is there and sound, was made from what its record says.

    And that the last record, which no other names, says what follows from those before and from its artifacts.
    """
    damaged = [damage.ref for damage in found.damages if damage.ref is not None]
    notes = None if found.rollbacks is None else found.rollbacks.values(), found.divergences.values()
    for record, before in zip(records, [None, *records], strict=False):
        if any(ref in damaged for ref in record.artifacts.values()):
            continue
        try:
            complaints = step_of(store, record, before).complaints
            if record is records[-1]:
                complaints = [*complaints, *not_derived(store, records, *notes)]
        except (ArtifactError, ChangedOnTheWay, OSError):
            continue  # it has been reported already
        found.damages += [of_record(str(found.run), record.iteration, complaint) for complaint in complaints]
    found.leave_newer()


def check_copies(run: str, found: Findings) -> None:
    """The copies of policies and of the reward model, as far as this machine has them."""
    for what, folder, command in copies_of(run):
        try:
            check_export(folder)
        except ArtifactCorrupted as error:
            damage = Damage(f"copy of the {what}", str(error), f"{command} makes it again")
            found.damages.append(replace(damage, repair="copy") if what == "best policy" else damage)
        except OSError as error:
            found.damages.append(Damage(f"copy of the {what}", str(error), ""))


def check_rest(store: ArtifactStore, progress: Progress, read: set[Name], pages: list[Page]) -> Findings:
    """The artifacts that were not `read` for a run, pages of none, and the journals of promotions."""
    found, needs = Findings(None), Reachability(store)
    check_pages(store, pages, found, progress, set())
    needed = needs.of_all()
    for stored in open_collector(store.root).artifacts():
        name = (stored.kind, stored.key)
        if name in read:
            continue
        found.artifacts += 1
        progress(f"{found.artifacts} artifacts besides")
        place = ArtifactRef(kind=stored.kind, uri=stored.key, digest="")
        try:
            found.bytes += store.check(place.model_copy(update={"digest": store.manifest(place).digest}))
        except ArtifactMissing:
            continue  # removed meanwhile
        except (ArtifactError, ChangedOnTheWay, OSError) as error:
            damage = Damage("/".join(name), str(error), "")
            if name not in needed and not needs.unreadable and isinstance(error, ArtifactCorrupted):
                remedy = "no record needs it: `ppoflow fsck --repair` sets it aside, `ppoflow gc` removes it"
                damage = replace(damage, remedy=remedy, repair="set aside", ref=place)
            found.damages.append(damage)
    found.damages += [Damage(what, why, "") for what, why in unreadable_promotions(store.root)]
    found.damages += lost_to_promotions(store, read) if PROMOTED not in needs.unreadable else []
    return found


def lost_to_promotions(store: ArtifactStore, read: set[Name]) -> Iterator[Damage]:
    """What promotions rest on and the store has no more; what is damaged of it has been found."""
    for kind, key in sorted(Promoted(store.root).needs() - read):
        try:
            missing = store.find(kind, key) is None
        except (ArtifactError, ChangedOnTheWay, OSError):
            continue
        if missing:
            remedy = "put it back from a copy of the store, or promote another version"
            yield Damage(f"{kind}/{key}", "a promoted version rests on it, and the store has no such artifact", remedy)
