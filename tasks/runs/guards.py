"""Limits that a healthy run never meets, and what happens when one is passed: stop, roll back, or warn."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts import ArtifactError, ArtifactRef
from infra.backend import is_remote
from infra.runs.records import RecordError
from ppo_core.spec import GuardsSpec, RunSpec
from tasks.runs.iteration_record import Attempt, IterationRecord
from tasks.runs.notes import (
    ROLLBACKS,
    Divergence,
    Rollback,
    attempt_at,
    last_attempt,
    note_changes,
    rollbacks_of,
    unfinished,
)
from tasks.runs.record_chain import record_digest
from tasks.runs.run_state import changed_values, changes_after, not_kept, record_at, recorded_spec
from tasks.stages.context import RunContext
from tasks.stages.jobs import MAKE_ROOM, DiskSpaceError

UNMEASURED = "gold/unmeasured"
"""Of the last two windows, the iterations without a score of the gold reward."""
DISTINCT = "response/distinct_2"
"""Not measured of responses that are all of one token."""
START_FACTOR = 3.0
"""An iteration against checkpoint 0: policy and critic, and two moments of each."""


class DivergedError(RuntimeError):
    """Training has gone wrong; the message names metric, value and limit, where the evidence is, and how to go on."""


@dataclass(frozen=True)
class Violation:
    """A metric on the wrong side of a limit."""

    metric: str
    value: float
    setting: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric}={self.value:.4g} passes guards.{self.setting}={self.limit:g}"


def violations(guards: GuardsSpec, metrics: Mapping[str, float], first_length: float | None) -> list[Violation]:
    """Every limit that an iteration's metrics pass; nan passes all. `first_length`: mean response length at first."""
    growth = None
    if first_length and "rollout/response_length" in metrics:
        growth = metrics["rollout/response_length"] / first_length
    rises = metrics.get("gold/score_change", 0.0) > 0
    measured = {
        **metrics,
        "length growth": growth,
        "gold fall": -metrics["gold/change"] if rises else None,
    }
    above = [
        ("kl/reference", "max_kl", guards.max_kl),
        ("response/repetition", "max_repetition", guards.max_repetition),
        ("response/length_correlation", "max_length_correlation", guards.max_length_correlation),
        ("gold fall", "max_gold_fall", guards.max_gold_fall),
        ("length growth", "max_length_growth", guards.max_length_growth),
        ("policy/clip_fraction", "max_clip_fraction", guards.max_clip_fraction),
        ("sampler/logprob_difference_mean", "max_sampler_difference", guards.max_sampler_difference),
    ]
    below = [
        ("policy/entropy", "min_entropy", guards.min_entropy),
        (DISTINCT, "min_distinct", guards.min_distinct),
        ("length growth", "min_length_growth", guards.min_length_growth),
    ]
    return [
        Violation(metric, value, setting, limit)
        for limits, sign in ((above, 1.0), (below, -1.0))
        for metric, setting, limit in limits
        if limit is not None and (value := measured.get(metric)) is not None and not sign * value <= sign * limit
    ]


def gold_trend(context: RunContext, previous: IterationRecord | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """How the means of `gold_reward` and of the score moved: over the last `gold_window` iterations, with `metrics` of
    the one after `previous`, less those over as many before. Nothing before there are so many.

    Where some of these iterations have no such mean, how many: there is no trend then, and nothing that a guard sees.
    Gold that falls while the score rises is over-optimisation: Gao et al. 2022 (arXiv:2210.10760), figure 1.
    """
    guards = context.spec.guards
    if guards.gold_reward is None or previous is None:
        return {}
    first = previous.iteration + 2 - 2 * guards.gold_window
    records = [record_at(context.records, iteration) for iteration in range(max(first, 1), previous.iteration + 1)]
    measured = [*(record.metrics for record in records), metrics]
    names = {"gold/change": f"score/{guards.gold_reward}", "gold/score_change": "score/mean"}
    if missing := sum(any(metric not in one for metric in names.values()) for one in measured):
        return {UNMEASURED: float(missing)}
    if first < 1:
        return {}
    trend = {}
    for name, metric in names.items():
        values = [one[metric] for one in measured]
        trend[name] = statistics.fmean(values[guards.gold_window :]) - statistics.fmean(values[: guards.gold_window])
    return trend


def unseen(spec: RunSpec, record: IterationRecord) -> list[str]:
    """The guards that could not look at an iteration, and why."""
    found, guards = [], spec.guards
    if (missing := record.metrics.get(UNMEASURED)) is not None:
        guard = (
            "the trend of the gold reward"
            if guards.max_gold_fall is None
            else f"guards.max_gold_fall={guards.max_gold_fall:g}"
        )
        found.append(
            f"iteration {record.iteration}: {guard} was not checked, because {missing:.0f} of the last "
            f"{min(record.iteration, 2 * guards.gold_window)} iterations have no score by guards.gold_reward="
            f"{guards.gold_reward}: see why in the column error of scores.parquet, or lower "
            f"reward.max_failed_fraction={spec.reward.max_failed_fraction:g}, and such an iteration fails"
        )
    if guards.min_distinct is not None and DISTINCT not in record.metrics:
        found.append(
            f"iteration {record.iteration}: guards.min_distinct={guards.min_distinct:g} was not checked, because no "
            "response has two tokens before the one that ends it: look at them in rollouts.parquet, or leave the guard "
            "out where answers are so short; guards.min_length_growth sees responses that become shorter"
        )
    return found


def passed_limits(context: RunContext, record: IterationRecord) -> list[Violation]:
    """The limits that a drafted record passes."""
    first = record_at(context.records, 1) if record.iteration > 1 else None
    first_length = first.metrics.get("rollout/response_length") if first is not None else None
    return violations(context.spec.guards, record.metrics, first_length)


def keep_evidence(context: RunContext, iteration: int, passed: list[str], record: IterationRecord | None) -> str:
    """Note a diverged iteration, so that what it made is kept and can be looked at. Returns the note's place.

    The same iteration again, the run having been started again, makes no second note.
    """
    notes = context.records.notes("divergences")
    note = Divergence(
        run=context.records.run,
        iteration=iteration,
        passed=passed,
        checkpoint=record.checkpoint.digest if record is not None else None,
        record=record.model_dump(mode="json") if record is not None else None,
    ).model_dump()
    if not notes or any(notes[-1].get(key) != note[key] for key in ("iteration", "passed", "checkpoint")):
        context.records.note("divergences", note)
    return context.records.last_note_place("divergences")


def diverged(
    run: str,
    iteration: int,
    passed: list[str],
    evidence: str | None = None,
    *,
    spent: int | None = None,
    damage: RecordError | None = None,
    made: bool = True,
) -> DivergedError:
    """The message to a person.

    `spent`: how often the run was rolled back, where that may not go on. `damage`: what of the run could not be read
    on the way, and the remedy. Without the iteration `made` to its end nothing can be gone on with.
    """
    resume = f"ppoflow resume {run} --set guards."
    cure, retry = "", f"{resume}on_divergence=rollback"
    if spent is not None:
        cure = f"It was rolled back {spent} times (guards.max_rollbacks) before. "
        retry = f"{resume}max_rollbacks={spent + 1}"
    last, kept = iteration - 1, "no evidence was kept" if evidence is None else f"its evidence is kept: {evidence}"
    if damage is not None:
        cure = f"Besides, what the run has written could not be read: {damage}. {cure}"
    return DivergedError(
        f"iteration {iteration} of run {run} diverged: {'; '.join(passed)}. It was not committed, so the run is at "
        f"iteration {last}; {kept}. {cure}To go back and retry with lower learning rates and "
        f"other samples: {retry}; to change settings: ppoflow fork {run}@{last} NEW --set update.learning_rate=…"
        + (f"; to ignore it: {resume}on_divergence=warn" if made else "")
    )


def current_attempt(context: RunContext, iteration: int) -> Attempt:
    """See `attempt_at`."""
    return attempt_at(rollbacks_of(context.records).values(), iteration)


def roll_back(context: RunContext, iteration: int, passed: list[str]) -> IterationRecord | None:
    """Give up the diverged iteration and some before it. Returns the record to go on from, None after too many.

    That is the nearest one from `guards.rollback_iterations` on which retention has left all that it takes, or what
    its checkpoint is made again from: before the guards were to roll back, it may have kept less.
    """
    guards, attempt = context.spec.guards, last_attempt(rollbacks_of(context.records).values())
    if attempt.number >= guards.max_rollbacks:
        return None

    def is_kept(n: int) -> bool:
        return not_kept(record_at(context.records, n), context.store) is None

    after = max(0, iteration - 1 - guards.rollback_iterations)
    after = next((n for n in range(after, iteration) if is_kept(n) or (n > 0 and is_kept(n - 1))), after)
    record = record_at(context.records, after)  # where it is damaged, nothing is given up
    lower = Attempt(number=attempt.number + 1, rate_factor=attempt.rate_factor * guards.rollback_rate_factor)
    follows = record_digest(context.records.read(after))
    note = Rollback(run=context.records.run, after=after, attempt=lower, passed=passed, follows=follows)
    context.records.note(ROLLBACKS, note.model_dump(mode="json"))
    take_out(context, after)
    return record


def take_out(context: RunContext, after: int) -> list[int]:
    """Take the records after iteration `after` out of the run; whoever goes on with it does so as this one would."""
    began_with = recorded_spec(context.records)
    if began_with is not None:
        changed = changed_values(began_with, context.spec)
        with suppress(RecordError):  # of one that is damaged, which says nothing
            if changes_after(context.records, record_at(context.records, after) if after >= 0 else None) != changed:
                note_changes(context.records, after, changed)
    return context.supersede(after)


def finish_rollback(context: RunContext) -> None:
    """Take out the records that the last rollback gave up and, being killed, left."""
    rollbacks, last = rollbacks_of(context.records).values(), context.records.last()
    pending = None if last is None or not rollbacks else unfinished(rollbacks, record_at(context.records, last))
    if pending is not None:
        take_out(context, pending.after)


def check_disk(context: RunContext, previous: IterationRecord) -> None:
    """Raise DiskSpaceError where the next iteration would not fit beside what is there."""
    factor = context.spec.guards.min_free_disk
    needed = math.ceil(factor * iteration_bytes(context, previous))
    place = disk_folder(context)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DiskSpaceError(
            f"{free / 2**30:.2f} GiB are free at {place}, and iteration {previous.iteration + 1} may take "
            f"{needed / 2**30:.2f} GiB (guards.min_free_disk={factor:g} times the one before it): {MAKE_ROOM}"
        )


def disk_folder(context: RunContext) -> Path:
    """A folder on the disk on which artifacts are made."""
    place = context.settings.cache_folder if is_remote(context.store.root) else Path(context.store.root)
    while not place.exists():
        place = place.parent
    return place


def iteration_bytes(context: RunContext, record: IterationRecord) -> float:
    """What an iteration like this one takes in the store."""
    if record.iteration == 0:
        return START_FACTOR * size_of(context, record.checkpoint)
    # A full checkpoint is the large part, and the next one may be full where this one is not.
    others = [ref for ref in record.artifacts.values() if ref.kind != "checkpoint"]
    return sum(size_of(context, ref) for ref in (record.base or record.checkpoint, *others))


def size_of(context: RunContext, ref: ArtifactRef) -> int:
    """Bytes of an artifact; none where it is missing or damaged, which here is nobody's concern."""
    try:
        return sum(entry.size for entry in context.store.manifest(ref).files.values())
    except ArtifactError:
        return 0
