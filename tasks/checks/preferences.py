"""All that can be known of a training on preferences before it starts, as `tasks.checks.run` has it of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from infra.artifacts import open_store
from infra.engines.process import EngineProcess
from infra.engines.protocol import EngineInput
from infra.settings import Settings
from ppo_core.spec import DpoSpec, RewardModelSpec
from tasks.checks.findings import require_recomputing
from tasks.checks.hub import find_sources
from tasks.checks.machine import check_job, machine_notes, require_gpus
from tasks.checks.preflight import preflight
from tasks.checks.run import Findings, ask_check, check_engine, checked_in, holder_notes
from tasks.checks.threads import submit
from tasks.preferences.context import preferences_job
from tasks.preferences.stages import TRAIN_DPO, TRAIN_REWARD_MODEL
from tasks.runs.kept import DPO_POLICIES, REWARD_MODELS, is_kept, with_own_commits
from tasks.stages.dataset_job import dataset_job
from tasks.stages.holding import DPO, REWARD_MODEL, lease_name


def before_start(spec: RewardModelSpec | DpoSpec, run: str) -> list[str]:
    """Raise InputError (or another of `tasks.runs.errors`) for what can be found without an engine; else notes."""
    notes, store = _notes(spec), open_store(Settings().store_root)
    _, more, missing = find_sources(with_own_commits(store.root, spec, run, flow_of(spec), keep=False), store)
    return [*notes, *more, *(f"{one}, which is downloaded first" for one in missing)]


def _notes(spec: RewardModelSpec | DpoSpec) -> list[str]:
    """Raise InputError for what neither the spec's folders nor this machine have; else what a person should know."""
    notes = preflight(spec)
    require_gpus(spec)
    return [*notes, *spec.notes(), *machine_notes(spec)]


def require_free(spec: RewardModelSpec | DpoSpec, run: str, *, noted: bool = False) -> list[str]:
    """Raise LeaseHeld where another process trains this, or note it."""
    flow = flow_of(spec)
    return holder_notes(open_store(Settings().store_root), lease_name(flow, run), f"{flow} {run}", noted=noted)


def flow_of(spec: RewardModelSpec | DpoSpec) -> str:
    """The flow that has it for a spec, as leases and pages name it."""
    return DPO if isinstance(spec, DpoSpec) else REWARD_MODEL


def check_preferences(
    spec: RewardModelSpec | DpoSpec, run: str | None = None, *, again: bool = False, wait: bool = False
) -> Findings:
    """Raise InputError (or another error of `tasks.runs.errors`) for what would end the training; see
    `checking_preferences`."""
    with checking_preferences(spec, run, again=again, wait=wait) as answer:
        return answer.result()


@contextmanager
def checking_preferences(
    spec: RewardModelSpec | DpoSpec,
    run: str | None = None,
    *,
    again: bool = False,
    wait: bool = False,
    starts: bool = False,
) -> Iterator[Future[Findings]]:
    """Check while the caller does something else; all is ended on the way out.

    A training that another process has now is refused, unless the caller means to `wait`; with `again` it is a note.
    Whoever `starts` it next is not told what the flow says itself.
    """
    started = time.monotonic()
    settings, name = Settings(), run or spec.name
    notes, store = _notes(spec), open_store(settings.store_root)
    notes += require_free(spec, name, noted=again) if again or not wait else []
    spec = with_own_commits(store.root, spec, name, flow_of(spec), keep=False)
    downloads, more, missing = find_sources(spec, store)
    notes += [
        *more,
        *(f"{one}, which training downloads first; data and model are checked then" for one in missing),
    ]
    told = [] if starts else notes
    with ThreadPoolExecutor(1) as pool:
        if missing:
            yield submit(pool, Findings, told, {"run": name})
        else:
            with check_engine() as engine:
                yield submit(pool, _check, engine, spec, name, downloads, told, started)


def is_trained(spec: RewardModelSpec | DpoSpec, run: str) -> bool:
    """Whether a policy, or a reward model, was trained before under the name of this run."""
    root = open_store(Settings().store_root).root
    if isinstance(spec, DpoSpec):
        return is_kept(root, DPO_POLICIES, run, TRAIN_DPO.kind)
    return is_kept(root, REWARD_MODELS, run, TRAIN_REWARD_MODEL.kind)


def _check(
    engine: EngineProcess,
    spec: RewardModelSpec | DpoSpec,
    name: str,
    downloads: Mapping[str, EngineInput],
    notes: list[str],
    started: float,
) -> Findings:
    job = preferences_job(spec).model_dump(mode="json")
    facts = ask_check(engine, "check_preferences", spec, job, "the data", downloads)
    if isinstance(spec, DpoSpec):
        prompts = check_job(spec, dataset_job(spec)).model_copy(update={"new": True})
        what = f"{spec.reward.labels} and the data"
        ask_check(engine, "check_run", spec, prompts.model_dump(mode="json"), what, downloads)
    require_recomputing(spec.training, facts)
    if repeated := facts["held_out_trained"]:
        held_out = f"{repeated} of {facts['counts']['eval']} held-out rows of preferences"
        notes = [
            *notes,
            f"{held_out} have a prompt that is trained on: accuracy there is of what was learned; duplicates: "
            "drop leaves such prompts out of training",
        ]
    store = open_store(Settings().store_root)
    return Findings(
        notes, {**_summary(spec, name, facts), "store": store.root, "checked": checked_in(started)}, facts["learned"]
    )


def _summary(spec: RewardModelSpec | DpoSpec, name: str, facts: dict[str, Any]) -> dict[str, str]:
    settings = Settings()
    folder = settings.dpo_policy_folder(name) if isinstance(spec, DpoSpec) else settings.reward_model_folder(name)
    context, counts, pairs = facts["context_length"], facts["counts"], facts["pairs"]
    data = [
        f"{counts['train']} rows ({pairs['train']} pairs) to train on",
        f"{counts['eval']} ({pairs['eval']}) held out",
    ]
    data += [f"{count} left out ({reason})" for reason, count in facts["left_out"].items()]
    made = "policy" if isinstance(spec, DpoSpec) else "reward model"
    return {
        "run": f"{name}, {'trained before' if (folder / 'config.json').is_file() else f'a new {made}'}",
        "data": ", ".join(data),
        "context": f"longest text {facts['longest']} tokens; the model "
        + ("has no limit" if context is None else f"reads {context} tokens"),
        "model": f"{facts['model_type']}, {facts['parameters'] / 1e6:.3g} million parameters, {spec.model.dtype}",
        "folder": str(folder),
    }
