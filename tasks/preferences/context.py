"""What the tasks of flows that learn from preferences work with: a run's means, without records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from infra.artifacts import open_store
from infra.backend import acquire_lease, open_records
from infra.mlflow.tracking import RunTracker
from infra.runs.lease import Heartbeat
from infra.runs.names import validate_run_name
from infra.settings import Settings
from infra.storage.objects import StoreUnavailable
from ppo_core.records import PreparePreferencesJob, content_digest
from ppo_core.spec import DpoSpec, RewardModelSpec
from tasks.preferences.kept import with_own_commits
from tasks.stages.context import OnProgress, RunContext, working
from tasks.stages.engines import Engines, require_shared_store

LONGEST = 80
"""Characters of a run's name, for its lease to have one that is not too long."""


@dataclass(frozen=True)
class PreferenceContext(RunContext):
    """A run's means. `flow` is in the names of its lease and its pages, `makes` says what comes out."""

    flow: ClassVar[str]
    makes: ClassVar[str]

    @property
    def preferences_job(self) -> PreparePreferencesJob:
        """The preferences, as what is trained reads them."""
        raise NotImplementedError


@dataclass(frozen=True)
class RewardModelContext(PreferenceContext):
    """Of a run that trains a reward model."""

    spec: RewardModelSpec
    flow = "reward-model"
    makes = "reward model"

    @property
    def preferences_job(self) -> PreparePreferencesJob:
        """Prompt and response as one text."""
        return PreparePreferencesJob(dataset=self.spec.dataset, model=self.spec.model)


@dataclass(frozen=True)
class DpoContext(PreferenceContext):
    """Of a run that trains a policy."""

    spec: DpoSpec
    flow = "dpo"
    makes = "policy"

    @property
    def preferences_job(self) -> PreparePreferencesJob:
        """Prompts in the form of the prompts that are answered, and responses as they are sampled."""
        data = self.spec.dataset
        return PreparePreferencesJob(
            dataset=self.spec.preferences,
            model=self.spec.model,
            by_policy=True,
            chat=data.chat,
            system_prompt=data.system_prompt,
        )


C = TypeVar("C", bound=PreferenceContext)


@contextmanager
def open_preference_run(
    kind: type[C], spec: RewardModelSpec | DpoSpec, run: str, on_progress: OnProgress
) -> Iterator[C]:
    """Means to learn from preferences with; engines start at once, and everything is closed on the way out.

    The run belongs to this process alone meanwhile: LeaseHeld where another one has it. A PPO run may have its name.
    """
    settings = Settings()
    require_shared_store(spec, settings.store_root)
    store, name = open_store(settings.store_root), f"_{kind.flow}-{short_name(validate_run_name(run))}"
    lease = acquire_lease(store.root, name)
    try:
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
    finally:
        with suppress(StoreUnavailable):  # whoever comes next finds this process gone, or silent
            lease.release()


def short_name(run: str) -> str:
    """The name, or its beginning with a hash of it all, where it is too long to have something in front."""
    return run if len(run) <= LONGEST else f"{run[: LONGEST - 13]}-{content_digest(run)[:12]}"
