"""All that can be known of a run before it starts, in seconds: what `ppoflow check` does, and training does first.

    settings, folders, model's files ─► the run of this name ─┐
                                                              ├─► findings, or a refusal
    the scoring engine (rows, tokenizer, rewards, model)  ────┘

Nothing is written. The user's code runs in a scoring engine of its own, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.artifacts import ArtifactStore, open_store
from infra.backend import open_leases, open_records
from infra.engines.hardware import has_nvidia_gpu
from infra.engines.process import EngineProcess
from infra.engines.protocol import EngineInput, EngineJob, EngineJobError, EngineTimeout
from infra.runs.holder import require_free
from infra.runs.owner import LeaseHeld
from infra.settings import Settings
from ppo_core.records import CheckRunJob, InputError
from ppo_core.spec import RunSpec
from tasks.checks.findings import findings_of, stands
from tasks.checks.hub import find_sources
from tasks.checks.preflight import preflight
from tasks.checks.same_files import made_of_these_files
from tasks.runs.run_state import changed_values, effective_spec, last_record, recorded_spec
from tasks.stages.dataset_job import dataset_job, reward_trial
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.jobs import ask
from tasks.stages.try_reward import doubts

REWARD_FAILED = "RewardFailed"


@dataclass(frozen=True)
class Standing:
    """Where a run stands: its last iteration (None: a new run), and whether it goes on with the same spec and files.

    `spec` is the one that it really has.
    """

    spec: RunSpec
    iteration: int | None
    unchanged: bool


@dataclass(frozen=True)
class Findings:
    """`notes`: what a person should know before the run starts; `good`: what was found in order, by subject."""

    notes: list[str] = field(default_factory=list)
    good: dict[str, str] = field(default_factory=dict)


def check_run(spec: RunSpec, run: str | None = None, *, again: bool = False, wait: bool = False) -> Findings:
    """Raise InputError (or another error of `tasks.runs.errors`) for what would end the run; see `checking`."""
    with checking(spec, run, again=again, wait=wait) as answer:
        return answer.result()


@contextmanager
def checking(
    spec: RunSpec, run: str | None = None, *, again: bool = False, wait: bool = False
) -> Iterator[Future[Findings]]:
    """Check while the caller does something else; all is ended on the way out.

    A run that another process has now is refused, unless the caller means to `wait`; with `again` it is a note.
    The rows of a run that goes on with the same spec and files were checked when it began, and are checked once more
    only with `again`.
    """
    started = time.monotonic()
    notes = preflight(spec)
    settings, name = Settings(), run or spec.name
    store = open_store(settings.store_root)
    notes += _holder(store, name, noted=again) if again or not wait else []
    with ThreadPoolExecutor(1) as pool, TemporaryDirectory(prefix="ppoflow-check-") as logs:
        engine = launch(EnginePlan("scoring", "check"), settings, Path(logs))
        engine.start()
        try:
            yield pool.submit(_check, engine, store, spec, name, notes, again, started)
        finally:
            engine.close()


def _check(
    engine: EngineProcess,
    store: ArtifactStore,
    spec: RunSpec,
    name: str,
    notes: list[str],
    again: bool,
    started: float,
) -> Findings:
    standing = _standing(store, name, spec)
    downloads, more, missing = find_sources(standing.spec, store)
    notes = [*notes, *more]
    if missing:
        notes += [f"{one}, which training downloads first; data, rewards and model are checked then" for one in missing]
        return Findings(notes, {"run": f"{name}, {stands(standing.iteration, spec.iterations)}"})
    if standing.iteration is not None and standing.unchanged and not again:
        _ask(engine, "try_reward", spec, reward_trial(spec, []), downloads)
        return Findings(notes)
    gpu = None if spec.engines.backend == "ray" else has_nvidia_gpu()
    job = CheckRunJob(dataset=dataset_job(spec), engines=spec.engines, gpu=gpu)
    facts = _ask(engine, "check_run", spec, job.model_dump(mode="json"), downloads)
    good = findings_of(spec, facts, name, standing.iteration, store.root)
    return Findings(
        [*notes, *doubts(facts["scores"], facts["errors"])],
        {**good, "checked": f"in {time.monotonic() - started:.1f} s; nothing was started"},
    )


def _holder(store: ArtifactStore, run: str, *, noted: bool) -> list[str]:
    """Raises LeaseHeld where a process has the run, or notes it."""
    try:
        require_free(open_leases(store.root, run))
    except LeaseHeld as held:
        told = f"{held}; with --wait, this one waits for that itself"
        if not noted:
            raise LeaseHeld(told, held.holder) from None
        return [told]
    return []


def _standing(store: ArtifactStore, name: str, spec: RunSpec) -> Standing:
    """Raises InputError where the run exists with another spec."""
    records = open_records(store.root, name)
    effective = effective_spec(spec, records)
    recorded = recorded_spec(records)
    changed = {} if recorded is None else changed_values(recorded, effective)
    last = last_record(records)
    if last is None:
        return Standing(effective, None, unchanged=False)
    same = set(changed) <= {"iterations"} and made_of_these_files(store, last.dataset, spec)
    return Standing(effective, last.iteration, unchanged=same)


def _ask(
    engine: EngineProcess, name: str, spec: RunSpec, document: dict[str, Any], downloads: Mapping[str, EngineInput]
) -> dict[str, Any]:
    folder, tokenizer = Path(spec.folder).absolute(), str(spec.model.tokenizer or spec.model.path)
    inputs = {
        **downloads,
        "sources": EngineInput(folder, ""),
        "tokenizer": downloads.get(tokenizer) or EngineInput(folder / tokenizer, ""),
    }
    if spec.model.path is not None:
        inputs["model"] = downloads.get(spec.model.path) or EngineInput(folder / spec.model.path, "")
    try:
        return ask(engine, EngineJob(name, inputs, None, document), silence_s=spec.engines.reward_timeout_s).result
    except EngineTimeout:
        raise InputError(
            f"nothing was heard from {spec.reward.labels} and the data for engines.reward_timeout_s="
            f"{spec.engines.reward_timeout_s:g} seconds: make them faster, or raise that limit"
        ) from None
    except EngineJobError as error:
        if error.error_type != REWARD_FAILED:
            raise
        raise InputError(error.reason) from None
