"""The state machine of `store_machine` finds nothing wrong with the store, and would if there were something."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from infra.artifacts import ArtifactMissing
from tests.infra.storage.store_machine import StoreMachine

FIXED = settings(
    max_examples=100,
    stateful_step_count=10,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def test_writers_a_collector_crashes_and_power_cuts():
    run_state_machine_as_test(StoreMachine, settings=FIXED)


class LooksBeforeItPins(StoreMachine):
    pins_first = False


class UnpinsBeforeItCommits(StoreMachine):
    keeps_pins = False


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [LooksBeforeItPins, UnpinsBeforeItCommits])
def test_it_finds_what_is_wrong(machine: type[StoreMachine]):
    # Which of its invariants breaks first depends on the order of random names; a writer may also miss what it uses.
    with pytest.raises((AssertionError, ArtifactMissing), match=r"is named by a record|is in use|holds no artifact"):
        run_state_machine_as_test(machine, settings=settings(FIXED, max_examples=1000))
