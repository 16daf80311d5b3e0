"""What the last record of a run says, against what follows from the records before it and from its own artifacts.

Each other record is named by its digest in the one after it; of the last, nothing else tells whether it was changed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from infra.artifacts import ArtifactStore
from infra.backend import is_remote
from ppo_core.spec import RunSpec
from tasks.runs.fork import compared_with
from tasks.runs.iteration_record import IterationRecord, best_of
from tasks.runs.notes import Divergence, Rollback, attempt_at, last_follows
from tasks.runs.run_state import with_changes
from tasks.stages.jobs import STATS
from tasks.stages.references import ExperienceRef, RolloutsRef, StageRef

MEASURED_BESIDES = ("seconds/", "memory/", "throughput/", "gold/", "score/ahead", "rollout/staleness")
"""What no stage measures: no artifact tells it."""


def not_derived(
    store: ArtifactStore,
    records: Sequence[IterationRecord],
    rollbacks: Collection[Rollback] | None,
    divergences: Iterable[Divergence],
) -> list[str]:
    """What the last of a run's records says otherwise than follows; `rollbacks` None: unreadable.

    Raises ArtifactError where an artifact of it cannot be read.
    """
    record = records[-1]
    named = [record.dataset, *record.artifacts.values()]
    complaints = [*_other_metrics(record)]
    try:
        complaints += _other_facts(store, named)
        started_with = RunSpec.model_validate(records[0].spec)
    except ValidationError:
        return complaints  # of an earlier version: what it asked for is not known here
    spec = with_changes(started_with, record.changed)
    before = records[-2] if len(records) > 1 else None
    derived = [*_cursor(record, before, spec), _kl_coef(record, spec), _best(records, started_with, spec)]
    if rollbacks is not None and not last_follows(records, rollbacks, divergences):
        follows = attempt_at(rollbacks, record.iteration)
        derived.append(("attempt", record.attempt_settings.model_dump(), follows.model_dump()))
    return complaints + [
        f"its {name} is {said}, and {follows} follows from what it was made from"
        for name, said, follows in filter(None, derived)
        if not _same(said, follows)
    ]


Derived = tuple[str, Any, Any]
"""Which value, what the record says, and what follows."""


def _other_facts(store: ArtifactStore, refs: Sequence[StageRef]) -> Iterator[str]:
    for ref in refs:
        if is_remote(store.root) and ref.kind == "checkpoint":
            continue  # it would be downloaded whole
        stats = json.loads((store.fetch(ref.bare()) / STATS).read_text())
        told = type(ref).of(ref.bare(), stats)
        if not _same(told.model_dump(), ref.model_dump()):
            yield f"it does not say of its {ref.kind} what {STATS} there says"


def _other_metrics(record: IterationRecord) -> Iterator[str]:
    measured = {name: value for ref in record.artifacts.values() for name, value in ref.metrics.items()}
    for name, value in measured.items():
        if not name.startswith(MEASURED_BESIDES) and not _same(record.metrics.get(name), value):
            yield f"its {name} is {record.metrics.get(name)}, and {value} was measured"


def _cursor(record: IterationRecord, before: IterationRecord | None, spec: RunSpec) -> Iterator[Derived]:
    rollouts = record.made("rollouts")
    drawn = rollouts.batches * spec.rollout.prompts_per_iteration if isinstance(rollouts, RolloutsRef) else 0
    position = drawn + (0 if before is None else before.position)
    yield "position", record.position, position
    if rows := record.dataset.counts.get("train"):
        yield "cursor", (record.epoch, record.index), divmod(position, rows)


def _kl_coef(record: IterationRecord, spec: RunSpec) -> Derived | None:
    if record.forked_from is not None:
        return None  # a fork may begin with another coefficient
    experience = record.made("experience")
    follows = experience.next_kl_coef if isinstance(experience, ExperienceRef) else spec.advantages.kl.coef
    return "next_kl_coef", record.next_kl_coef, follows


def _best(records: Sequence[IterationRecord], started_with: RunSpec, spec: RunSpec) -> Derived:
    *earlier, record = records
    if earlier:
        earlier = compared_with(earlier[-1], started_with, spec, earlier.__getitem__, lambda: records[:-1])
    best = best_of(spec.registry.metric, record.metrics, record.iteration, record.checkpoint, earlier)
    return "best", record.best.model_dump(), best.model_dump()


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same also where a number is none (NaN)."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
