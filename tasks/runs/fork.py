"""A new run that shares the records of another one up to an iteration, and goes on with other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.artifacts import open_store
from infra.backend import collecting_paused, open_leases, open_records, open_runs
from infra.runs.holder import require_free
from infra.runs.owner import LeaseHeld
from infra.runs.records import RecordExists
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec, differing_keys
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.notes import ROLLBACKS, rollbacks_in
from tasks.runs.record_chain import link, made_with, record_digest
from tasks.runs.run_state import NOT_KEPT, committed, committed_at, not_kept, spec_of_run, with_changes
from tasks.stages.hub_names import with_commits

FIXED = ("algorithm.", "model.", "sft.", "sft: ")
"""What made the policy that the new run goes on with: other values would say something untrue."""
HELD_OUT = (
    *("evaluation", "evaluation_fraction", "prompt_column", "answer_column", "drop_columns"),
    *("chat", "system_prompt", "max_prompt_tokens", "too_long"),
)
"""Keys of `dataset` on which the held-out prompts depend; where they are a part of `train`, that too."""
ANSWERED = ("max_response_tokens", "stop", "stop_token_ids", "temperature")
"""Keys of `rollout` on which the answers of an evaluation depend."""


def parse_place(place: str) -> tuple[str, int]:
    """`RUN@ITERATION`. Raises InputError for anything else."""
    run, at, iteration = place.rpartition("@")
    if not at or not run or not iteration.isdecimal():
        raise InputError(f"{place!r}: write RUN@ITERATION, for example demo@12")
    return run, int(iteration)


def fork_spec(source: str, iteration: int, new: str, overrides: list[str], folder: str | None = None) -> RunSpec:
    """The spec that `fork_run` would give run `new`. Raises InputError as it does, but for a name that has only a lease
    and is not held here."""
    spec, root = _spec_from(source, iteration, overrides, folder), open_store(Settings().store_root).root
    if open_records(root, new).read_spec() is not None:
        raise taken(new, root)
    try:
        require_free(open_leases(root, new))
    except LeaseHeld as held:
        raise InputError(f"{held}; or choose another name") from None
    return spec


def _spec_from(source: str, iteration: int, overrides: list[str], folder: str | None) -> RunSpec:
    """The spec of a run that goes on from there, its folder absolute from now on."""
    before = spec_of_run(source, folder)
    asked = before.with_overrides(overrides)
    spec = with_commits(asked.model_copy(update={"folder": str(Path(asked.folder).absolute())}))
    fixed = [line for line in differing_keys(before.document(), spec.document()) if line.startswith(FIXED)]
    if fixed:
        raise InputError(f"a fork starts from the policy of {source}, so these keys cannot change: {'; '.join(fixed)}")
    require_kept(committed_at(source, iteration))
    if spec.iterations <= iteration:
        raise InputError(
            f"iterations={spec.iterations} leaves nothing to do after {source}@{iteration}, where the fork begins: "
            f"--set iterations={iteration + 1} or more, or fork at an earlier iteration"
        )
    return spec


def fork_run(source: str, iteration: int, new: str, overrides: list[str], folder: str | None = None) -> RunSpec:
    """Create run `new` with the records 0 to `iteration` of run `source`; returns its spec.

    Raises InputError for an unknown run or iteration, a name that is taken, or settings that a fork cannot change.
    """
    root = open_store(Settings().store_root).root
    before, spec = spec_of_run(source, folder), _spec_from(source, iteration, overrides, folder)
    with collecting_paused(root):  # or what the new run shares could go before its records name it
        records = committed(source).records[: iteration + 1]
        require_kept(records[-1])
        try:
            shared = shared_records(before, spec, records, new)
            notes = {ROLLBACKS: shared_rollbacks(new, shared)}
            open_runs(root).create(new, spec.model_dump(mode="json"), shared, notes)
        except RecordExists:
            raise taken(new, root) from None
    return spec


def taken(run: str, root: str) -> InputError:
    """The refusal of a name that a run has, or one that left nothing but its lease."""
    if run in open_runs(root).names():
        return InputError(f"run {run} exists already: choose another name")
    return InputError(
        f"run {run} has no record, but its name is taken: it was ended before its first record, or is starting now. "
        f"Choose another name, or remove runs/{run} from {root} once no process has it"
    )


def shared_records(
    before: RunSpec, spec: RunSpec, records: list[IterationRecord], new: str
) -> dict[int, dict[str, Any]]:
    """The records of a run with spec `before` as those of run `new` with another spec, chained anew."""
    source, started_with, previous = records[-1], spec.model_dump(mode="json"), None
    shared: dict[int, dict[str, Any]] = {}
    for record in records:
        then = with_changes(before, record.changed)
        changed = changed_sections(spec, then)
        changes = {
            "run": new,
            "forked_from": f"{source.run}@{source.iteration}",
            "lease": 0,
            "changed": changed,
            "spec_digest": made_with(started_with, changed),
            "spec": started_with if record.iteration == 0 else None,
            "previous": previous,
        }
        if record is source and spec.schedule == "synchronous":
            changes["sampler"] = None  # from here on every policy answers for itself
        if record is source and price(spec) != price(then):
            changes["next_kl_coef"] = spec.advantages.kl.coef
        shared[record.iteration] = record.model_copy(update=changes).model_dump(mode="json")
        previous = record_digest(shared[record.iteration])
    return shared


def shared_rollbacks(new: str, shared: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rollbacks before its records as notes of run `new`: it begins in the attempt of the last of them."""
    return [one.model_dump(mode="json") for one in rollbacks_in([link(new, record) for record in shared.values()])]


def price(spec: RunSpec) -> tuple[str, float]:
    """What the price of divergence begins with: the records tell only how it goes on."""
    return spec.advantages.kl.kind, spec.advantages.kl.coef


def changed_sections(spec: RunSpec, made_with: RunSpec) -> dict[str, Any]:
    """What of `made_with` is no part of `spec`; whole sections, for a fork may change what they consist of."""
    document = spec.document()
    return {name: value for name, value in made_with.document().items() if document[name] != value}


def measured_with(spec: RunSpec) -> dict[str, Any]:
    """What an evaluation depends on besides the policy: only where all of it is equal do metrics compare."""
    held_out = HELD_OUT if spec.dataset.evaluation is not None else (*HELD_OUT, "train")
    return {
        "reward": spec.reward.model_dump(mode="json"),
        "dataset": spec.dataset.model_dump(mode="json", include=set(held_out)),
        "rollout": spec.rollout.model_dump(mode="json", include=set(ANSWERED)),
        "evaluation": spec.evaluation.model_dump(mode="json", exclude={"every"}),
    }


def comparable(records: Iterable[IterationRecord], started_with: RunSpec, spec: RunSpec) -> list[IterationRecord]:
    """Those that were measured as `spec` measures: of a fork's shared records perhaps none. `started_with`: the run's
    own first spec."""
    wanted = measured_with(spec)
    return [
        record
        for record in records
        if record.forked_from is None or measured_with(with_changes(started_with, record.changed)) == wanted
    ]


def compared_with(
    previous: IterationRecord,
    started_with: RunSpec,
    spec: RunSpec,
    at: Callable[[int], IterationRecord],
    every: Callable[[], Iterable[IterationRecord]],
) -> list[IterationRecord]:
    """What the record after `previous` is compared with for the best so far: the best one, unless it was chosen by
    another metric or does not compare. `at` gives one record, `every` all up to `previous`."""
    best = previous if previous.best.iteration == previous.iteration else at(previous.best.iteration)
    if previous.best.metric == spec.registry.metric and comparable([best], started_with, spec):
        return [best]
    return comparable(every(), started_with, spec)


def require_kept(record: IterationRecord) -> None:
    """Raise InputError where retention has removed what going on from this record needs."""
    if (gone := not_kept(record)) is not None:
        raise InputError(
            f"iteration {record.iteration} of run {record.run} cannot be continued from: its {gone.kind} {gone.key} "
            f"{NOT_KEPT}: choose an iteration that is"
        )
