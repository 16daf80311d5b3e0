"""Empty databases of Prefect and MLflow, made once when ppoflow is installed; those of a new home begin as copies.

To make its tables one by one takes Prefect four seconds of processor time and MLflow one, in every new home. Where the
copies were not made, or are of another version, both make their tables themselves.

    python -m infra.empty_databases      makes them in this environment
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.addresses import sqlite_url
from infra.settings import child_environment, export

FOLDER = Path(sys.prefix) / "share" / "ppoflow"
SQLITES_OWN = ("-wal", "-shm", "-journal")
"""Ends of the names of files that SQLite keeps beside a database, and would apply to another one in its place."""


def make_prefect(path: Path) -> None:
    """Prefect's tables, and no row but their version."""
    place = {
        "PREFECT_HOME": str(path.parent),
        "PREFECT_PROFILE": "ephemeral",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": sqlite_url(path, "sqlite+aiosqlite"),
    }
    upgrade = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
    subprocess.run(upgrade, env=child_environment(place), check=True, capture_output=True, text=True)


def make_mlflow(path: Path) -> None:
    """MLflow's tables, without its first experiment, which would hold the path of its artifacts."""
    export({"MLFLOW_DISABLE_TELEMETRY": "true"})  # it would leave a file in the home of who installs
    import sqlalchemy
    from mlflow.store.db.utils import _initialize_tables

    engine = sqlalchemy.create_engine(sqlite_url(path))
    _initialize_tables(engine)
    engine.dispose()


PACKAGES: dict[str, Callable[[Path], None]] = {"prefect": make_prefect, "mlflow": make_mlflow}


def begin(package: str, database: Path, folder: Path | None = None) -> bool:
    """Put the empty database of `package` at `database`, all of it or nothing; False where one is, or no copy is.

    `folder` holds the copies; by default that of this environment.
    """
    try:
        empty = (folder or FOLDER) / _name(package)
    except PackageNotFoundError:
        return False
    beside = [database.with_name(database.name + end) for end in ("", *SQLITES_OWN)]
    if not empty.is_file() or any(os.path.lexists(path) for path in beside):
        return False
    new = database.with_name(f".{database.name}-{os.getpid()}")
    try:  # what cannot be written here, the package says better
        database.parent.mkdir(parents=True, exist_ok=True)
        with empty.open("rb") as source, new.open("xb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
        os.link(new, database)  # never over another's
    except OSError:
        return False
    finally:
        with suppress(OSError):
            new.unlink()
    return True


def main(folder: Path | None = None) -> None:
    """Make the empty databases of this environment's versions, and remove those of others."""
    folder = folder or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    names = {_name(package): make for package, make in PACKAGES.items()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: _make(folder / one[0], one[1]), names.items()))
    for old in folder.glob("*.db"):
        if old.name not in names:
            old.unlink()


def _make(path: Path, make: Callable[[Path], None]) -> None:
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            new = Path(scratch) / path.name
            make(new)
            new.rename(path)


def _name(package: str) -> str:
    return f"{package}-{version(package)}.db"


if __name__ == "__main__":
    main()
