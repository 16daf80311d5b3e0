"""Who has a run, as somebody sees it who only looks: in a folder and on S3."""

from __future__ import annotations

import os

import pytest

from infra.process_identity import ProcessIdentity, this_process
from infra.runs.holder import holder_of, require_free
from infra.runs.lease import Lease
from infra.runs.owner import LeaseHeld, LeaseOwner
from tests.infra.places import Place
from tests.infra.runs.leases import somebody


def take(place: Place, identity: ProcessIdentity) -> Lease:
    """The run for a process that finds every other one dead."""
    return place.acquire(identity=identity, alive=lambda _: False)


def look(place: Place) -> LeaseOwner | None:
    """Who has it."""
    return holder_of(place.leases())


def test_who_has_a_run_is_told_as_long_as_it_has(place: Place):
    assert look(place) is None
    here, elsewhere = this_process(), somebody("elsewhere")
    take(place, elsewhere)
    found = look(place)
    assert found is not None
    assert found.identity == elsewhere  # nobody here can tell whether it lives
    lease = take(place, here)
    found = look(place)
    assert found is not None
    assert found.identity == here
    lease.release()
    assert look(place) is None


def test_a_dead_process_of_this_machine_has_nothing(place: Place):
    take(place, this_process().model_copy(update={"started": 1}))
    assert look(place) is None


def test_whoever_only_looks_is_refused_by_a_process_that_goes_on(place: Place):
    require_free(place.leases())
    take(place, somebody("elsewhere"))
    require_free(place.leases())  # whether it lives, one look does not tell
    lease = take(place, this_process())
    with pytest.raises(LeaseHeld, match=rf"run r: process {os.getpid()} on .* has it, last heard of 0 s ago: wait"):
        require_free(place.leases())
    lease.release()
    require_free(place.leases())
