"""What the tasks of a reward model work with: a run's means, without records and rollout engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from infra.artifacts import open_store
from infra.backend import acquire_lease, open_records
from infra.mlflow.tracking import RunTracker
from infra.runs.lease import Heartbeat
from infra.runs.names import validate_run_name
from infra.settings import Settings
from infra.storage.objects import StoreUnavailable
from ppo_core.records import content_digest
from ppo_core.spec import RewardModelSpec
from tasks.stages.context import OnProgress, RunContext, working
from tasks.stages.engines import Engines, require_shared_store

LEASE = "_reward-model-{run}"
LONGEST = 100 - len(LEASE.format(run=""))
"""Characters of a run's name, for its lease to have one that is not too long."""


@dataclass(frozen=True)
class RewardModelContext(RunContext):
    """A run's means, of a flow that trains a reward model."""

    spec: RewardModelSpec


@contextmanager
def open_reward_model_run(spec: RewardModelSpec, run: str, on_progress: OnProgress) -> Iterator[RewardModelContext]:
    """Means to train a reward model with; engines start at once, and everything is closed on the way out.

    The run belongs to this process alone meanwhile: LeaseHeld where another one has it. A PPO run may have its name.
    """
    settings = Settings()
    require_shared_store(spec, settings.store_root)
    store, name = open_store(settings.store_root), LEASE.format(run=short_name(validate_run_name(run)))
    lease = acquire_lease(store.root, name)
    try:
        context = RewardModelContext(
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
