"""Workbenches for tests: everything real, engines started only when a task asks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.artifacts import open_store
from infra.runs import RunRecords
from infra.settings import Settings
from infra.tracking import RunTracker
from ppo_core.spec import RunSpec
from tasks.engines import Engines
from tasks.workbench import Workbench, ignore

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"


def smoke_spec(*overrides: str) -> RunSpec:
    """The smoke spec, with `section.key=value` on top."""
    return RunSpec.from_yaml(ARITHMETIC / "smoke.yaml", list(overrides))


def workbench(spec: RunSpec, home: Path, run: str = "test", engines: Engines | None = None) -> Workbench:
    """A workbench on a store under `home`."""
    settings = Settings(home=home, store=str(home / "store"), tracking_uri=f"sqlite:///{home}/mlflow.db")
    store = open_store(settings.store_root)
    return Workbench(
        spec=spec,
        run=run,
        settings=settings,
        store=store,
        records=RunRecords(store.root, run),
        engines=engines or Engines(spec, settings, home / "logs"),
        tracker=RunTracker(settings.tracking_uri, spec.name, run, home / "artifacts"),
        watch=ignore,
    )


def stored_files(home: Path) -> list[Any]:
    """Everything below the store but folders: what a failure has left."""
    return [path for path in (home / "store").rglob("*") if path.is_file()]
