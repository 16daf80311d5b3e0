"""What Prefect's pages show of a collection."""

from __future__ import annotations

from prefect.artifacts import create_table_artifact

from tasks.runs.retention import Garbage
from tasks.stages.stage import stage

SHOWN = 1000


@stage("show_garbage", retries=0)
def show_garbage(garbage: Garbage, *, removed: bool) -> None:
    """The table of what goes, or could."""
    rows = [{"what": what, "MiB": round(size / 2**20, 1), "why": why} for what, size, why in garbage.rows()]
    verb = "removed" if removed else "found"
    create_table_artifact(
        rows[:SHOWN], key="store-garbage", description=f"{len(rows)} things that nobody needs, {verb}"
    )
