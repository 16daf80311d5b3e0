"""By which id a tracking server knows a run: noted before its first record, and the same wherever it goes on.

Names do not tell: two stores may have a run of one name, and report to one server.
"""

from __future__ import annotations

from uuid import uuid4

from infra.runs.checksummed_json import RecordError
from infra.runs.records import RunRecords

TRACKING = "tracking"


def tracking_id(records: RunRecords) -> str | None:
    """The id of a run; None where it has none yet, or its note is damaged: it is told by its name, then."""
    try:
        noted = records.notes(TRACKING)
    except RecordError:
        return None
    return str(noted[0]["id"]) if noted else None


def note_tracking_id(records: RunRecords) -> str | None:
    """The same; a run that has none yet gets one, for which `records` must hold its lease."""
    try:
        noted = records.notes(TRACKING)
    except RecordError:
        return None
    if noted:
        return str(noted[0]["id"])
    new = uuid4().hex
    records.note(TRACKING, {"run": records.run, "id": new})
    return new
