"""How often a flow run of a deployment is started again before a person has to look."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ppo_core.records import InputError
from tasks.prefect import deployment_params
from tasks.prefect.deployment_params import MOST_STARTS, requested
from tests.tasks.run_contexts import smoke_spec


@pytest.mark.parametrize(
    ("deployment", "starts", "refused"),
    [("d", MOST_STARTS, False), ("d", MOST_STARTS + 1, True), (None, MOST_STARTS + 1, False)],
)
def test_what_crashes_each_time_is_not_started_for_ever(
    deployment: str | None, starts: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_params, "deployment_id", lambda: deployment)
    monkeypatch.setattr(deployment_params, "flow_run", SimpleNamespace(run_count=starts))
    if refused:
        with pytest.raises(InputError, match=rf"was started {starts} times, and crashed each time: see its logs"):
            requested(smoke_spec(), "toy", None)
        return
    spec, run = requested(smoke_spec(), "toy", ["iterations=7"])
    assert (spec.iterations, run) == (7, "toy")
