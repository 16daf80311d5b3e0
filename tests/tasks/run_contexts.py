"""Run contexts for tests: everything real, engines started only when a task asks one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.artifacts.local_store import LocalStore
from infra.mlflow.tracking import RunTracker
from infra.runs.local_lease import acquire_lease
from infra.runs.local_records import LocalRecords
from infra.settings import Settings
from infra.storage.filesystem import FileSystem, LocalFiles
from ppo_core.spec import RunSpec
from tasks.stages.context import RunContext
from tasks.stages.engines import Engines
from tests.infra.runs.leases import dead_here
from tests.tasks.toy_engines import ToyEngines
from tests.tasks.toy_tracker import ToyTracker

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"


class QuickFiles(LocalFiles):
    """The real file system, for tests that lose no power: nothing waits for the disk."""

    def sync_file(self, path: Path) -> None:
        """Later."""

    def sync_folder(self, path: Path) -> None:
        """Later."""


def ignore(progress: Any) -> None:
    """Show no progress."""


def smoke_spec(*overrides: str) -> RunSpec:
    """The smoke spec, with `section.key=value` on top."""
    return RunSpec.from_yaml(ARITHMETIC / "smoke.yaml", list(overrides))


def run_context(
    spec: RunSpec,
    home: Path,
    run: str = "test",
    engines: Engines | ToyEngines | None = None,
    tracker: RunTracker | ToyTracker | None = None,
    *,
    files: FileSystem | None = None,
    taking_over: bool = False,
) -> RunContext:
    """A run context on a store under `home`; with `taking_over` a new process that finds all others dead."""
    settings = Settings(home=home, store=str(home / "store"), tracking_uri=f"sqlite:///{home}/mlflow.db")
    files = files or QuickFiles()
    store = LocalStore(Path(settings.store_root), files=files)
    if taking_over:
        lease = acquire_lease(store.root, run, files=files, identity=dead_here(), alive=lambda _: False)
    else:
        lease = acquire_lease(store.root, run)
    return RunContext(
        spec=spec,
        run=run,
        settings=settings,
        store=store,
        records=LocalRecords(store.root, run, files=files, lease=lease),
        engines=engines or Engines(spec, settings, home / "logs"),
        tracker=tracker or RunTracker(settings.tracking_uri, spec.name, run, home / "artifacts"),
        on_progress=ignore,
        lease=lease,
    )


def stored_files(home: Path) -> list[Any]:
    """Everything below the store but folders and what the run's lease left: what a failure has left."""
    files = [path for path in (home / "store").rglob("*") if path.is_file()]
    return [path for path in files if "leases" not in path.parts and not path.name.startswith(".")]
