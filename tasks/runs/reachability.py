"""What the records of all runs of a store need. Records never change, so each is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from infra.artifacts import ArtifactError, ArtifactRef, ArtifactStore
from infra.backend import open_runs
from infra.mlflow.alias_journal import PROMOTIONS, Journals, Move
from infra.runs.listing import RunListing
from infra.runs.records import RecordError, RecordMissing, RunRecords, Runs, remedy_for
from infra.storage.objects import StoreRefused
from infra.storage.rereading import ChangedOnTheWay
from tasks.runs.iteration_record import ChainedRecord, IterationRecord
from tasks.runs.kept import DPO_POLICIES, REGISTERED, REWARD_MODELS, Page, pages_of
from tasks.runs.notes import DIVERGENCES, RERUNS
from tasks.runs.record_chain import check_chain, check_last, link, unless_changed
from tasks.stages.table import BY_NAME

Name = tuple[str, str]
KEPT_VERSIONS = 5
"""So many versions that an alias pointed to keep their policies, whatever becomes of their runs."""
PROMOTED = "the journal of promotions"
READABLE = "make it readable, or move it out of the store"
REFUSED = (OSError, StoreRefused, ChangedOnTheWay)
"""What a store raises that does not give what it has."""


def kept_iterations(records: list[IterationRecord]) -> set[int]:
    """The iterations whose training state the last record's retention keeps: the last ones, every so many, the best.

    Of each of these also the best until then: whoever goes back to it goes on with that best.
    """
    if not records:
        return set()
    rule = records[-1].retention
    if rule.keep_last is None:
        return {record.iteration for record in records}
    kept = {record.iteration for record in records[-rule.keep_last :]}
    if rule.keep_every is not None:
        kept |= {record.iteration for record in records if record.iteration % rule.keep_every == 0}
    return kept | {record.best.iteration for record in records if record.iteration in kept}


def promised(records: list[IterationRecord]) -> list[IterationRecord]:
    """The records whose training state no retention lets go, from theirs on, whatever was taken out of the run since.

    So not the last few that a retention keeps: records that were rolled back may have let them go. Nor those of a
    fork's source, which go by that run's.
    """
    rules, found = set[tuple[int | None, int | None]](), list[IterationRecord]()
    for record in reversed(records):
        rules.add((record.retention.keep_last, record.retention.keep_every))
        if record.forked_from is None and all(
            last is None or (every is not None and record.iteration % every == 0) for last, every in rules
        ):
            found.append(record)
    return found


class Reachability:
    """What the runs of a store need; remembers what it has read, so that asking again costs what is new.

    `unreadable` says of which runs (or journals) the last look could not tell, and why.
    """

    def __init__(
        self,
        store: ArtifactStore,
        runs: Runs | None = None,
        promoted: Callable[[], set[Name]] | None = None,
    ) -> None:
        self._store = store
        self._runs = open_runs(store.root) if runs is None else runs
        self._opened: dict[str, RunRecords] = {}
        self._records: dict[tuple[str, str], ChainedRecord | None] = {}
        self._inputs: dict[Name, list[ArtifactRef]] = {}
        self._pages: dict[Page, set[Name]] = {}
        self._besides = {PROMOTED: promoted or Promoted(store.root).needs}
        if promoted is None:
            self._besides["the pages of reward models"] = partial(self.of_pages, REWARD_MODELS)
            self._besides["the pages of DPO"] = partial(self.of_pages, DPO_POLICIES)
            self._besides["the pages of registered policies"] = partial(self.of_pages, REGISTERED)
        self.unreadable: dict[str, str] = {}

    def of_all(self) -> set[Name]:
        """What the records of all runs need, diverged iterations (kept as evidence) included."""
        self.unreadable = {}
        needed: set[Name] = set()
        for run in self._names():
            needed |= self._or_unreadable(f"run {run}", lambda run=run: self._of_run(run))  # type: ignore[misc]
        for whose, needs in self._besides.items():
            needed |= self._or_unreadable(whose, needs)
        return needed

    def among(self, wanted: Iterable[Name]) -> Callable[[], set[Name]]:
        """Looks which of `wanted` the records need. What cannot be read may need anything, so it keeps all of them."""
        names = set(wanted)

        def look() -> set[Name]:
            needed = self.of_all()
            return needed | names if self.unreadable else needed

        return look

    def _names(self) -> list[str]:
        try:
            names = self._runs.names(started=False)
            self.unreadable |= self._runs.unreadable()
            return names
        except REFUSED as error:
            self.unreadable["any run"] = f"{error}: {READABLE}"
            return []

    def _or_unreadable(self, whose: str, read: Callable[[], set[Name]]) -> set[Name]:
        try:
            return read()
        except RecordError as error:
            self.unreadable[whose] = str(error)
        except REFUSED as error:
            self.unreadable[whose] = f"{error}: {READABLE}"
        return set()

    def _of_run(self, run: str) -> set[Name]:
        if run not in self._opened:
            self._opened[run] = self._runs.records(run)
        records = self._opened[run]

        def read(contents: RunListing) -> set[Name]:
            if not contents.iterations and records.read_spec() is not None:
                raise RecordMissing(
                    f"run {run} has a spec and no record, so its records are lost, or it was ended before the first: "
                    f"put them back, let `ppoflow resume {run}` make them again, or remove what is left of the run"
                )
            chain = self._links(records, contents)
            check_last(records, contents, chain)
            needed = self.of([one.record for one in chain])
            for found in self._read(records, contents.notes.get(DIVERGENCES, ())):
                needed |= self.of([found.record])
            for found in self._read(records, contents.notes.get(RERUNS, ())[-1:]):
                needed |= self.of([found.record])  # of an iteration that is being done again, perhaps by the next start
            return needed

        return unless_changed(records, read)

    def of(self, records: list[IterationRecord]) -> set[Name]:
        """What a run's records need."""
        return {(ref.kind, ref.key) for _, ref in self.named(records)}

    def of_pages(self, folder: str) -> set[Name]:
        """What the pages in a folder name; each is read once. Raises RecordError for a damaged one."""
        pages = pages_of(self._store.root, folder)
        for page in pages:
            if page not in self._pages:
                self._pages[page] = {(ref.kind, ref.key) for ref in page.artifacts()}
        return set[Name]().union(*(self._pages[page] for page in pages))

    def of_each(self, records: Iterable[IterationRecord]) -> set[Name]:
        """What it takes to go on from each of them."""
        return set[Name]().union(*(self.of([record]) for record in records))

    def named(self, records: list[IterationRecord]) -> list[tuple[int, ArtifactRef]]:
        """The same as references, each once, with the iteration that made it.

        What was sampled, scored and evaluated is always kept.
        """
        kept = kept_iterations(records)
        found: dict[tuple[str, str, str], tuple[int, ArtifactRef]] = {}
        for record in records:
            refs: list[ArtifactRef] = [*record.downloads, record.dataset, record.reference]
            for stage, ref in record.artifacts.items():
                if BY_NAME[stage].kept or record.iteration in kept:
                    refs.append(ref)
            if record.evaluation is not None:
                refs += self._inputs_of(record.evaluation)
            made: list[tuple[int, ArtifactRef | None]] = [(record.iteration, ref) for ref in refs]
            if record.iteration in kept:
                base = record.iteration - len(record.replay)
                made += [(record.iteration - 1, record.sampler), (base, record.base)]
                made += [(base + n, ref) for n, ref in enumerate(record.replay, 1)]
            for iteration, needed in made:
                if needed is not None:
                    found.setdefault((needed.kind, needed.key, needed.digest), (iteration, needed))
        return list(found.values())

    def records_of(self, records: RunRecords) -> list[IterationRecord]:
        """A run's records, in order. Raises RecordError where they are damaged."""
        return unless_changed(records, lambda contents: [one.record for one in self._links(records, contents)])

    def _links(self, records: RunRecords, contents: RunListing) -> list[ChainedRecord]:
        found = self._read(records, contents.iterations.values())
        there = [n for n, mark in contents.iterations.items() if self._records[records.run, mark] is not None]
        check_chain(records.run, there, found)
        return found

    def _read(self, records: RunRecords, marks: Iterable[str]) -> list[ChainedRecord]:
        marks = list(marks)
        new = [mark for mark in marks if (records.run, mark) not in self._records]
        for mark, document in zip(new, records.marked(new), strict=True):
            # The note of a diverged iteration holds its record, if it came to one; that of a rerun, until it has ended.
            of_note = document is not None and "record" in document
            content = document["record"] if document is not None and of_note else document
            remedy = remedy_for(records.run, mark.partition("/")[0]) if of_note else None
            self._records[records.run, mark] = None if content is None else link(records.run, content, remedy=remedy)
        found = [self._records[records.run, mark] for mark in marks]
        return [one for one in found if one is not None]

    def _inputs_of(self, ref: ArtifactRef) -> list[ArtifactRef]:
        """What an artifact was made from, but for checkpoints; nothing where it is missing or damaged itself."""
        name = ref.kind, ref.key
        if name not in self._inputs:
            try:
                inputs = self._store.manifest(ref.model_copy()).inputs
            except ArtifactError:
                return []
            self._inputs[name] = [given for given in inputs if given.kind != "checkpoint"]
        return self._inputs[name]


class Promoted:
    """What the promotions of a store's models rest on, and so must stay; remembers what it has read."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._journals: Journals | None = None

    def needs(self) -> set[tuple[str, str]]:
        """Kind and key of what they name: the evidence of every move, and the policies of the last ones."""
        needed: set[tuple[str, str]] = set()
        journals = self._journals = self._journals or Journals(self._root)
        for model in journals.models():
            moves = journals.of(model).moves()
            kept = {move.number for alias in {move.alias for move in moves} for move in last_moves(moves, alias)}
            refs = [(move.number, ref) for move in moves for ref in move.artifacts]
            needed |= {(ref.kind, ref.key) for number, ref in refs if ref.kind != "checkpoint" or number in kept}
        return needed


def last_moves(moves: Sequence[Move], alias: str) -> list[Move]:
    """The last moves of an alias to different versions: those that one would go back to."""
    by_version = {move.version: move for move in moves if move.alias == alias and move.artifacts}
    return sorted(by_version.values(), key=lambda move: move.number)[-KEPT_VERSIONS:]


def unreadable_promotions(root: str) -> Iterator[tuple[str, str]]:
    """Which journals of a store's models cannot be read, and why."""
    unreadable, journals = (RecordError, ChangedOnTheWay, OSError), Journals(root)
    try:
        models = journals.models()
    except unreadable as error:
        yield PROMOTIONS, str(error)
        return
    for model in models:
        try:
            journals.of(model).moves()
        except unreadable as error:
            yield f"{PROMOTIONS} of {model}", str(error)
