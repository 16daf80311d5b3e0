"""Collecting garbage as a flow: what no record of any run needs is listed, and removed where that is asked for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from tasks.prefect.flow_tags import tag_run
from tasks.prefect.server import EmbeddedFlow
from tasks.report import show_garbage
from tasks.runs.retention import find_garbage, remove_garbage


class CollectionReport(BaseModel):
    """What was found, and how much of it was removed; of what the needs are `unreadable`, and so all artifacts kept."""

    model_config = ConfigDict(frozen=True)

    things: int
    found_bytes: int
    removed_bytes: int
    unreadable: dict[str, str] = {}


def collect(remove: bool = False, damaged: bool = False) -> CollectionReport:
    """List what no record of any run needs; safe while runs are writing.

    Args:
        remove: Remove it too; otherwise only look
        damaged: Also what was set aside as damaged
    """
    garbage = find_garbage(damaged=damaged)
    show_garbage(garbage, removed=remove)
    removed = remove_garbage(garbage) if remove else 0
    return CollectionReport(
        things=len(garbage.rows()),
        found_bytes=garbage.bytes,
        removed_bytes=removed,
        unreadable=garbage.unreadable,
    )


collect_garbage: EmbeddedFlow[[bool, bool], CollectionReport] = EmbeddedFlow(
    fn=collect,
    name="gc",
    description="Remove from the store what no record of any run needs.",
    validate_parameters=True,
    persist_result=False,
    on_running=[tag_run],
)
