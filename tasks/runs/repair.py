"""Repairs that need no engine: a lost spec, records that cannot be believed, damaged artifacts set aside."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from infra.artifacts import open_store
from infra.backend import open_records
from infra.runs.lease import Heartbeat
from infra.runs.records import RecordError, RunRecords
from infra.settings import Settings
from tasks.runs.findings import Findings
from tasks.runs.fsck import check_lineage, check_records
from tasks.runs.iteration_record import read_record
from tasks.runs.notes import note_changes, noted_changes
from tasks.runs.record_chain import made_with, spec_document, spec_in
from tasks.runs.run_state import note_again
from tasks.stages.holding import held


def repair_records(run: str) -> list[str]:
    """Write a lost spec and lost notes again, and take records from the first damaged one on out; what was done.

    What is damaged is looked at again, for a run may have gone on since it was found. Raises LeaseHeld where a process
    has the run, and LeaseLost where one takes it over meanwhile.
    """
    done = []
    store = open_store(Settings().store_root)
    with held(store.root, run) as lease, Heartbeat(lease, on_lost=lambda: None):
        records, found = open_records(store.root, run, lease=lease), Findings(run)
        check_lineage(store, check_records(records, records.contents(), found), found)
        if found.to_repair("spec"):
            records.restore_spec(spec_in(records.read(0)))
            done.append(f"the spec of run {run} is written again")
        suspects = [damage.iteration for damage in found.to_repair("records")]
        if suspects:
            last = min(suspects) - 1
            if (changed := newest_changes(records, last)) is not None:
                note_changes(records, last, changed)
            taken = sorted(records.supersede(last))
            done.append(
                f"iterations {', '.join(map(str, taken))} are taken out of run {run} and kept aside: "
                f"`ppoflow resume {run}` makes them again"
                if taken
                else f"iteration {last} is the last one of run {run} now: `ppoflow resume {run}` goes on from it"
            )
        lost = found.lost if found.to_repair("notes") else []
        note_again(records, lost)
        done += [f"the rollback of run {run} to iteration {one.after} is noted again" for one in lost]
    return done


def newest_changes(records: RunRecords, last: int) -> Mapping[str, Any] | None:
    """What had changed of the run's spec in the newest of its records after `last` that says so and can be read; those
    of the run itself name the digest of the spec that they were made with."""
    with suppress(RecordError, ValidationError):
        began_with, there = spec_document(records), [number for number in records.iterations() if number > last]
        with suppress(RecordError):  # of a damaged note, which says nothing
            if there and (noted := noted_changes(records, there[-1])) is not None:
                return noted
        for iteration in reversed(there if began_with else []):
            with suppress(RecordError, ValidationError):
                record = read_record(records.read(iteration))
                sound = record.spec_digest == made_with(began_with or {}, record.changed)
                if sound and record.run == records.run and record.forked_from is None:
                    return record.changed
    return None


def set_aside(found: Findings) -> list[str]:
    """Set aside what is still damaged and nothing needs, or a command makes again; what was done."""
    store = open_store(Settings().store_root)
    refs = [damage.ref for damage in found.to_repair("set aside") if damage.ref is not None]
    places = [(ref, store.set_aside(ref.kind, ref.key)) for ref in refs]
    return [f"{ref.kind}/{ref.key} was set aside at {place}" for ref, place in places if place is not None]
