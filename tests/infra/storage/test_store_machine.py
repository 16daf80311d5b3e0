"""The state machine of `store_machine` finds nothing wrong with the stores, and would if there were something."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from infra.artifacts import ArtifactMissing
from tests.infra.storage.store_machine import BucketMachine, DiskMachine, StoreMachine

FIXED = settings(
    max_examples=100,
    stateful_step_count=10,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (DiskMachine, 20),
        (BucketMachine, 5),
        pytest.param(DiskMachine, 100, marks=pytest.mark.thorough),
        pytest.param(BucketMachine, 20, marks=pytest.mark.thorough),
    ],
)
def test_writers_a_collector_crashes_and_power_cuts(machine: type[StoreMachine], examples: int):
    run_state_machine_as_test(machine, settings=settings(FIXED, max_examples=examples))


# With these seeds a fault is found in a second or two, with any other in ten seconds or more.
@seed(4)
class LooksBeforeItPins(DiskMachine):
    pins_first = False


@seed(8)
class UnpinsBeforeItCommits(DiskMachine):
    keeps_pins = False


@seed(5)
class LooksBeforeItPinsInABucket(BucketMachine):
    pins_first = False


@seed(3)
class UnpinsBeforeItCommitsInABucket(BucketMachine):
    keeps_pins = False


WRONG = [LooksBeforeItPins, UnpinsBeforeItCommits, LooksBeforeItPinsInABucket, UnpinsBeforeItCommitsInABucket]


@pytest.mark.thorough
@pytest.mark.parametrize("machine", WRONG)
def test_it_finds_what_is_wrong(machine: type[StoreMachine]):
    # Which of its invariants breaks first depends on the order of random names; a writer may also miss what it uses.
    with pytest.raises((AssertionError, ArtifactMissing), match=r"is named by a record|is in use|holds no artifact"):
        run_state_machine_as_test(machine, settings=settings(FIXED, max_examples=1000))
