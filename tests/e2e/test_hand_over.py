"""A finished run's policy becomes the champion through the commands that people use, on real engines."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import one_server, ppoflow

pytestmark = pytest.mark.thorough
CANDIDATE = "models:/arithmetic-smoke@candidate"


def test_the_candidate_becomes_champion_and_its_lineage_leads_to_the_prompts(smoke: FinishedRun) -> None:
    with one_server(smoke.home):
        # As the run has evaluated it: what lies in the store is taken from there.
        promoted = ppoflow(smoke.home, "promote", CANDIDATE, "--set", "promotion.max_kl=50")
        assert promoted.returncode == 0, promoted.stdout + promoted.stderr
        assert "promote of version 1 in place of no version" in promoted.stdout
        again = ppoflow(smoke.home, "promote", CANDIDATE)
        assert again.returncode == 1
        assert "version 1 of arithmetic-smoke is champion already" in again.stdout
    shown = ppoflow(smoke.home, "lineage", "models:/arithmetic-smoke@champion")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    best = smoke.report["best_iteration"]
    for expected in (f"run        first, iteration {best}", "iteration 0    checkpoint", "of generate.py:prompts"):
        assert expected in shown.stdout
    assert "removed by retention" not in shown.stdout
    refused = ppoflow(smoke.home, "rollback", "arithmetic-smoke")
    assert refused.returncode == 2
    assert "has no version to go back to" in refused.stderr
