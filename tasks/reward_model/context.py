"""What the tasks of a reward model work with: a run's means, without records and rollout engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from infra.artifacts import open_store
from infra.backend import acquire_lease, open_records
from infra.mlflow.tracking import RunTracker
from infra.runs.lease import Heartbeat
from infra.runs.names import validate_run_name
from infra.settings import Settings
from ppo_core.spec import RewardModelSpec
from tasks.stages.context import OnProgress, RunContext, working
from tasks.stages.engines import Engines, require_shared_store

LEASE = "_reward-model-{run}"


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
    store, name = open_store(settings.store_root), LEASE.format(run=validate_run_name(run))
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
        lease.release()
