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
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.artifacts import ArtifactStore, open_store
from infra.backend import open_leases, open_records
from infra.engines.process import EngineProcess
from infra.engines.protocol import EngineInput, EngineJob, EngineJobError, EngineTimeout
from infra.runs.holder import require_free
from infra.runs.owner import LeaseHeld
from infra.settings import Settings
from infra.storage.outage import stop_waiting
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from ppo_core.spec.flow_spec import FlowSpec
from tasks.checks.findings import findings_of, require_recomputing, stands
from tasks.checks.hub import find_sources
from tasks.checks.machine import check_job, machine_notes
from tasks.checks.preflight import preflight
from tasks.checks.same_files import made_of_these_files
from tasks.checks.threads import submit
from tasks.checks.try_reward import doubts, require_scores, too_slow
from tasks.runs.run_state import changed_values, effective_spec, last_record, recorded_spec, require_rerunnable
from tasks.stages.dataset_job import dataset_job, reward_trial
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.jobs import ask

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
    """`notes`: what a person should know before the run starts; `good`: what was found in order, by subject; `learned`:
    the prompts of preferences to train on, in short."""

    notes: list[str] = field(default_factory=list)
    good: dict[str, str] = field(default_factory=dict)
    learned: str = ""


def check_run(
    spec: RunSpec,
    run: str | None = None,
    *,
    again: bool = False,
    wait: bool = False,
    trial: RunSpec | None = None,
    learned: str = "",
) -> Findings:
    """Raise InputError (or another error of `tasks.runs.errors`) for what would end the run; see `checking`."""
    with checking(spec, run, again=again, wait=wait, trial=trial, learned=learned) as answer:
        return answer.result()


def check_deployed(
    spec: RunSpec, run: str, *, wait: bool = False, again_from: int | None = None, flow_run: str | None = None
) -> list[str]:
    """Under a deployment, refuse what cannot run, and return notes; elsewhere that was done before the flow run."""
    from tasks.prefect.client import deployment_id  # prefect, which the command imports while it checks

    return check_asked(spec, run, wait=wait, again_from=again_from, flow_run=flow_run) if deployment_id() else []


def check_asked(
    spec: RunSpec, run: str, *, wait: bool = False, again_from: int | None = None, flow_run: str | None = None
) -> list[str]:
    """Refuse what cannot run, and return notes. `again_from`: an iteration that the run shall do again; `flow_run`
    asks for that, perhaps not for the first time."""
    if again_from is not None:
        require_rerunnable(run, again_from, flow_run)
    return check_run(spec, run, wait=wait).notes


@contextmanager
def checking(
    spec: RunSpec,
    run: str | None = None,
    *,
    again: bool = False,
    wait: bool = False,
    trial: RunSpec | None = None,
    learned: str = "",
) -> Iterator[Future[Findings]]:
    """Check while the caller does something else; all is ended on the way out.

    A run that another process has now is refused, unless the caller means to `wait`; with `again` it is a note.
    The rows of a run that goes on with the same spec and files were checked when it began, and are checked once more
    only with `again`; so are the notes that the run itself gives when it starts. `trial` is tried in place of
    a spec that names what is not there yet: of its scores nothing is said. Held-out prompts among `learned` are noted.
    """
    started = time.monotonic()
    notes = preflight(trial or spec)
    store, name = open_store(Settings().store_root), run or spec.name
    notes += holder_notes(store, name, noted=again) if again or not wait else []
    with ThreadPoolExecutor(1) as pool, check_engine() as engine:
        try:
            yield submit(pool, _check, engine, store, spec, trial, name, notes, again, started, learned)
        except KeyboardInterrupt:
            stop_waiting()  # the check, which may wait for a store that has stopped to answer
            raise


ENGINE: ContextVar[EngineProcess | None] = ContextVar("check engine", default=None)


@dataclass
class KeptEngine:
    """The scoring engine of a check that found nothing wrong, still running; `closing` ends it."""

    engine: EngineProcess | None = None
    closing: ExitStack = field(default_factory=ExitStack)


KEPT: ContextVar[KeptEngine | None] = ContextVar("kept engine", default=None)


@contextmanager
def keeping_check_engine() -> Iterator[KeptEngine]:
    """Checks inside leave their engine running, until here at the latest: whoever goes on may take it over."""
    kept = KeptEngine()
    token = KEPT.set(kept)
    try:
        with kept.closing:
            yield kept
    finally:
        KEPT.reset(token)


@contextmanager
def check_engine() -> Iterator[EngineProcess]:
    """A scoring engine of its own, which starts at once; checks inside of another's `check_engine` share that one."""
    engine = ENGINE.get()
    if engine is not None:
        try:
            yield engine
        except BaseException:
            engine.close()  # its job must not keep who was interrupted
            raise
        return
    with ExitStack() as closing:
        logs = closing.enter_context(TemporaryDirectory(prefix="ppoflow-check-"))
        engine = launch(EnginePlan("scoring", "check"), Settings(), Path(logs))
        closing.callback(engine.close)
        engine.start()
        token = ENGINE.set(engine)
        try:
            yield engine
        finally:
            ENGINE.reset(token)
        kept = KEPT.get()
        if kept is not None and kept.engine is None:
            kept.engine = engine
            kept.closing.push(closing.pop_all())


def _check(
    engine: EngineProcess,
    store: ArtifactStore,
    spec: RunSpec,
    trial: RunSpec | None,
    name: str,
    notes: list[str],
    again: bool,
    started: float,
    learned: str,
) -> Findings:
    standing, tried = _standing(store, name, spec), trial or spec
    what = f"{tried.reward.labels} and the data"
    downloads, more, missing = find_sources(standing.spec, store)
    told = [*standing.spec.notes(), *machine_notes(standing.spec)] if again else []  # by the run itself, else
    notes = [*notes, *more, *told]
    if missing:
        notes += [f"{one}, which training downloads first; data, rewards and model are checked then" for one in missing]
        return Findings(notes, {"run": f"{name}, {stands(standing.iteration, spec.iterations)}"})
    job = check_job(tried, dataset_job(tried)).model_copy(
        update={"learned": learned, "new": standing.iteration is None}
    )
    if standing.iteration is not None and standing.unchanged and not again:
        ask_check(engine, "try_reward", tried, reward_trial(tried, [], new=False), what, downloads)
        return Findings(notes)
    facts = ask_check(engine, "check_run", tried, job.model_dump(mode="json"), what, downloads)
    require_recomputing(tried.training, facts)
    if trial is None:
        require_scores(facts["scores"], facts["errors"])
    longest = facts["longest_prompt"] + tried.rollout.max_response_tokens
    notes += [
        f"the reward {component} reads {context} tokens, and the longest prompt and response have some {longest}: what "
        "is longer gets no score of it; lower rollout.max_response_tokens, or take a reward model with a longer context"
        for component, context in facts["short_rewards"].items()
    ]
    if known := facts["learned_held_out"]:
        held_out = f"{known} of {facts['counts']['eval']} held-out prompts of the run"
        notes.append(f"{held_out} are among the preferences that its reward model is trained on")
    good = findings_of(tried, facts, name, standing.iteration, store.root)
    return Findings(
        [*notes, *(doubts(facts["scores"], facts["errors"]) if trial is None else [])],
        {**good, "checked": checked_in(started)},
    )


def checked_in(started: float) -> str:
    """The last line of what a check says."""
    return f"in {time.monotonic() - started:.1f} s; nothing was started"


def holder_notes(store: ArtifactStore, run: str, shown: str = "", *, noted: bool) -> list[str]:
    """Raises LeaseHeld where a process has the run, or, for a check, notes it. `shown`: what people call the run."""
    try:
        require_free(open_leases(store.root, run))
    except LeaseHeld as held:
        told = str(held).replace(f"run {run}:", f"{shown}:", 1) if shown else held
        if not noted:
            raise LeaseHeld(f"{told}; or use --wait, and this command waits for it", held.holder) from None
        return [str(told)]
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


def ask_check(
    engine: EngineProcess,
    name: str,
    spec: FlowSpec,
    document: dict[str, Any],
    what: str,
    downloads: Mapping[str, EngineInput],
) -> dict[str, Any]:
    """The facts that a job of the scoring engine finds; `what` of the user's may be what it is silent about."""
    folder, tokenizer = Path(spec.folder).absolute(), str(spec.model.tokenizer or spec.model.path)
    inputs = {
        **downloads,
        "sources": EngineInput(folder, ""),
        "tokenizer": downloads.get(tokenizer) or EngineInput(folder / tokenizer, ""),
    }
    if spec.model.path is not None:
        inputs["model"] = downloads.get(spec.model.path) or EngineInput(folder / spec.model.path, "")
    if spec.critic is not None:
        inputs["critic"] = downloads.get(spec.critic) or EngineInput(folder / spec.critic, "")
    try:
        return ask(engine, EngineJob(name, inputs, None, document), silence_s=spec.engines.reward_timeout_s).result
    except EngineTimeout:
        raise too_slow(what, spec) from None
    except EngineJobError as error:
        if error.error_type != REWARD_FAILED:
            raise
        raise InputError(error.reason) from None
