"""Room on the disks that a run writes to."""

from __future__ import annotations

import shutil

from infra.settings import Settings
from ppo_core.records import InputError
from tasks.runs.state_folder import Place, nearest, places

MIB = 1 << 20
LEAST_MIB = 200
"""Prefect's and MLflow's databases and the first artifacts of the smallest run take some tens."""


def require_room(settings: Settings) -> None:
    """Raise InputError where a run could not even begin to write."""
    for place in places(settings):
        require_free(place, shutil.disk_usage(nearest(place.path)).free)


def require_free(place: Place, free: int) -> None:
    """Raise InputError for a disk with too few bytes `free`."""
    if free < LEAST_MIB * MIB:
        raise InputError(
            f"{place.what} {place.path} is on a disk with {free // MIB} MiB free, and a run needs {LEAST_MIB} MiB to "
            f"start: free some (ppoflow gc removes what no run needs), or set {place.variable} to another disk"
        )
