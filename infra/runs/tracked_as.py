"""The id of a run on a tracking server, by which it differs from runs of the same name in other stores.

It is noted in the store before the first record, and stays the same wherever the run goes on.
"""

from __future__ import annotations

from uuid import uuid4

from infra.runs.names import TRACKING
from infra.runs.records import RunRecords


def tracking_id(records: RunRecords) -> str | None:
    """The id of a run; None where it has none yet. Raises RecordError where its note is damaged.

    Its name alone does not do then: a run of that name in another store may have the same one.
    """
    noted = records.notes(TRACKING)
    return str(noted[0]["id"]) if noted else None


def note_tracking_id(records: RunRecords) -> str:
    """The same; a run that has none yet gets one, for which `records` must hold its lease."""
    noted = tracking_id(records)
    if noted is not None:
        return noted
    new = uuid4().hex
    records.note(TRACKING, {"run": records.run, "id": new})
    return new
