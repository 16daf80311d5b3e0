"""The folders that a run writes to: there, or to be made, and writable."""

from __future__ import annotations

import os
from pathlib import Path

from infra.artifacts import REMOTE
from infra.settings import Settings
from ppo_core.records import InputError


def require_readable_state(settings: Settings) -> None:
    """Raise InputError where the state folder or a local store cannot be read; nothing there yet is no mistake."""
    for path, variable in state_folders(settings):
        folder = nearest(path, variable)
        if folder == path and not os.access(folder, os.R_OK | os.X_OK):
            raise InputError(f"{path} cannot be read by {_who()}: {_remedy(variable)}")


def require_writable_state(settings: Settings) -> None:
    """Raise InputError where a run could not write its state; makes nothing."""
    require_readable_state(settings)
    inner = [(settings.prefect_home, "PPOFLOW_HOME"), (settings.mlflow_folder, "PPOFLOW_HOME")]
    for path, variable in [*state_folders(settings), *inner, (settings.home / "runs", "PPOFLOW_HOME")]:
        folder = nearest(path, variable)
        if not os.access(folder, os.W_OK | os.X_OK):
            what = f"{path} cannot be written to" if folder == path else f"{path} cannot be made: {folder} is read-only"
            raise InputError(f"{what} for {_who()}: {_remedy(variable)}")


def state_folders(settings: Settings) -> list[tuple[Path, str]]:
    """Folders of the user's choice, each with the variable that names it."""
    if settings.store_root.startswith(REMOTE):
        return [(settings.home, "PPOFLOW_HOME"), (settings.cache_folder, "PPOFLOW_CACHE")]
    store = Path(settings.store_root.removeprefix("file://"))
    return [(settings.home, "PPOFLOW_HOME"), (store, "PPOFLOW_STORE")]


def nearest(path: Path, variable: str = "PPOFLOW_HOME") -> Path:
    """The folder itself, or the nearest one above it that exists. Raises InputError where a file is in the way."""
    for place in (path, *path.parents):
        if place.is_dir():
            return place
        if os.path.lexists(place):
            raise InputError(
                f"{place} is a file where {path} needs a folder: move it, or set {variable} to another folder"
            )
    return Path("/")


def _remedy(variable: str) -> str:
    return f"change its permissions, or set {variable} to a folder of your own"


def _who() -> str:
    return f"user {os.geteuid()}"
