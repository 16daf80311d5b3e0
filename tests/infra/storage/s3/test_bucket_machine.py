"""The state machine of `bucket_machine` finds nothing wrong with runs on S3, and would if there were something."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.infra.storage.s3.bucket_machine import BucketMachine

FIXED = settings(
    max_examples=20,
    stateful_step_count=8,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def test_writers_a_collector_and_crashes() -> None:
    run_state_machine_as_test(BucketMachine, settings=FIXED)


class LooksBeforeItPins(BucketMachine):
    pins_first = False


@pytest.mark.thorough
def test_it_finds_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match=r"is named by a record|is in use"):
        run_state_machine_as_test(LooksBeforeItPins, settings=settings(FIXED, max_examples=1000))
