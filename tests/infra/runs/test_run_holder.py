"""Who has a run, as somebody sees it who only looks: in a folder and on S3."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from infra.backend import open_leases
from infra.process_identity import ProcessIdentity, this_process
from infra.runs import local_lease as local
from infra.runs import s3_lease as remote
from infra.runs.holder import holder_of, require_free
from infra.runs.lease import Lease
from infra.runs.owner import LeaseHeld, LeaseOwner
from infra.runs.s3_lease import LeaseStates
from infra.runs.s3_pointer import RunHead
from infra.storage.objects import S3Address
from tests.infra.runs.bucket_runs import ROOT
from tests.infra.runs.leases import somebody
from tests.infra.storage.s3.memory_objects import MemoryObjects

Take = Callable[[ProcessIdentity], Lease]
Look = Callable[[], LeaseOwner | None]
Free = Callable[[], None]


@pytest.fixture(params=["folder", "S3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Take, Look, Free]:
    """How to take a run that finds every other process dead, and how to look at it and to ask for it."""
    if request.param == "folder":
        take = partial(local.acquire_lease, tmp_path, "r")
        return (
            lambda identity: take(identity=identity, alive=lambda _: False),
            lambda: holder_of(open_leases(tmp_path, "r")),
            lambda: require_free(open_leases(tmp_path, "r")),
        )
    objects = MemoryObjects()
    take_remote = partial(remote.acquire_lease, ROOT, "r", objects=objects)
    return (
        lambda identity: take_remote(identity=identity, alive=lambda _: False),
        lambda: holder_of(LeaseStates(RunHead(objects, S3Address.parse(ROOT), "r"))),
        lambda: require_free(LeaseStates(RunHead(objects, S3Address.parse(ROOT), "r"))),
    )


def test_who_has_a_run_is_told_as_long_as_it_has(run: tuple[Take, Look, Free]) -> None:
    take, look, _ = run
    assert look() is None
    here, elsewhere = this_process(), somebody("elsewhere")
    take(elsewhere)
    found = look()
    assert found is not None
    assert found.identity == elsewhere  # nobody here can tell whether it lives
    lease = take(here)
    found = look()
    assert found is not None
    assert found.identity == here
    lease.release()
    assert look() is None


def test_a_dead_process_of_this_machine_has_nothing(run: tuple[Take, Look, Free]) -> None:
    take, look, _ = run
    take(this_process().model_copy(update={"started": 1}))
    assert look() is None


def test_whoever_only_looks_is_refused_by_a_process_that_goes_on(run: tuple[Take, Look, Free]) -> None:
    take, _, require_it_free = run
    require_it_free()
    take(somebody("elsewhere"))
    require_it_free()  # whether it lives, one look does not tell
    lease = take(this_process())
    with pytest.raises(LeaseHeld, match=rf"run r: process {os.getpid()} on .* has it, last heard of 0 s ago: wait"):
        require_it_free()
    lease.release()
    require_it_free()
