"""A run is its process's own from the moment that it has the lease, however long it takes to find out the spec."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.artifacts import open_store
from infra.runs.lease import Heartbeat, LeaseLost
from infra.runs.local_lease import acquire_lease
from infra.runs.records import RunRecords
from infra.settings import Settings
from ppo_core.spec import RunSpec
from tasks.stages import context
from tasks.stages.context import RunContext, open_run_context
from tests.infra.runs.leases import somebody
from tests.tasks.run_contexts import ignore, smoke_spec
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run below this test's folder, whose heart beats every 10 ms."""
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PPOFLOW_STORE", raising=False)
    monkeypatch.setattr(context, "Heartbeat", partial(Heartbeat, every_s=0.01))
    monkeypatch.setattr("tests.waiting.LONG_S", 30.0)


def children() -> set[int]:
    """The processes of this one; other tests have some too, which may end."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def beats() -> int:
    """How often the heart of the run has beaten."""
    [place] = (Path(open_store(Settings().store_root).root) / "runs" / "slow" / "leases").glob("*/heartbeat")
    return int(json.loads(place.read_text())["beat"])


def test_the_heart_beats_while_the_spec_is_found_out() -> None:
    class HubAnswered(Exception):
        pass

    def ask_a_slow_hub(spec: RunSpec, records: RunRecords) -> RunSpec:
        until(lambda: beats() > 2, "a beat")
        raise HubAnswered

    with (
        pytest.raises(HubAnswered),
        open_run_context(RunContext, smoke_spec(), "slow", ignore, ask_a_slow_hub),
    ):
        raise AssertionError("opened")


def test_a_run_that_is_taken_over_meanwhile_starts_no_engine() -> None:
    def is_taken_over(spec: RunSpec, records: RunRecords) -> RunSpec:
        acquire_lease(open_store(Settings().store_root).root, "slow", identity=somebody(), alive=lambda _: False)
        return spec

    opened, others = False, children()
    with (
        pytest.raises(LeaseLost, match="its lease 1 was taken over"),
        open_run_context(RunContext, smoke_spec(), "slow", ignore, is_taken_over),
    ):
        opened = True
    assert not opened
    assert children() <= others
