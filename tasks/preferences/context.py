"""What the tasks of flows that learn from preferences work with: a run's means, without records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from infra.artifacts import open_store
from infra.backend import open_records
from infra.engines.protocol import OnProgress
from infra.mlflow.tracking import RunTracker
from infra.runs.lease import Heartbeat
from infra.settings import Settings
from ppo_core.records import PreparePreferencesJob
from ppo_core.spec import DpoSpec, RewardModelSpec
from tasks.runs.kept import DPO_POLICIES, REWARD_MODELS, with_own_commits
from tasks.stages.context import RunContext, working
from tasks.stages.engines import Engines, require_shared_store
from tasks.stages.holding import DPO, REWARD_MODEL, held, lease_name


@dataclass(frozen=True)
class PreferenceContext(RunContext):
    """A run's means. `flow` is in the names of its lease and its pages, `makes` says what comes out, which
    is kept by the pages of the name `kept_by`."""

    flow: ClassVar[str]
    makes: ClassVar[str]
    kept_by: ClassVar[str]
    spec: RewardModelSpec | DpoSpec  # type: ignore[assignment]  # with what the stages that it runs read


@dataclass(frozen=True)
class RewardModelContext(PreferenceContext):
    """Of a run that trains a reward model."""

    spec: RewardModelSpec
    flow = REWARD_MODEL
    makes = "reward model"
    kept_by = REWARD_MODELS


@dataclass(frozen=True)
class DpoContext(PreferenceContext):
    """Of a run that trains a policy."""

    spec: DpoSpec
    flow = DPO
    makes = "policy"
    kept_by = DPO_POLICIES


def preferences_job(spec: RewardModelSpec | DpoSpec) -> PreparePreferencesJob:
    """The preferences, as what is trained reads them.

    A reward model reads prompt and response as one text; a policy prompts in the form of those that are answered, and
    responses as they are sampled.
    """
    data = spec.dataset
    return PreparePreferencesJob(
        dataset=spec.dataset.preferences if isinstance(spec, RewardModelSpec) else spec.preferences,
        model=spec.model,
        by_policy=isinstance(spec, DpoSpec),
        chat=data.chat,
        system_prompt=data.system_prompt,
    )


C = TypeVar("C", bound=PreferenceContext)


@contextmanager
def open_preference_run(
    kind: type[C],
    spec: RewardModelSpec | DpoSpec,
    run: str,
    on_progress: OnProgress,
    *,
    note: Mapping[str, str] = {},
    wait: bool = False,
    keep: Callable[[], bool] | None = None,
) -> Iterator[C]:
    """Means to learn from preferences with; engines start at once, and everything is closed on the way out.

    The run belongs to this process alone meanwhile, as `open_run_context` says. A PPO run may have its name.
    """
    settings = Settings()
    require_shared_store(spec, settings.store_root)
    store, name = open_store(settings.store_root), lease_name(kind.flow, run)
    with held(store.root, name, note=note, wait=wait, keep=keep) as lease:
        spec = with_own_commits(store.root, spec, run, kind.flow, keep=True)
        context = kind(
            spec=spec,
            run=run,
            settings=settings,
            store=store,
            records=open_records(store.root, name),
            engines=Engines(spec, settings, settings.log_folder(name), run=name),
            tracker=RunTracker(settings.tracking_uri, spec.name, run, settings.mlflow_folder / "artifacts"),
            on_progress=on_progress,
            lease=lease,
        )
        with Heartbeat(lease, on_lost=context.engines.close), working(context):
            yield context
