"""A run that dies at every stage, and goes on by the same command, ends as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.attacks import RUN, Attack, Victim, delay, policies
from tests.e2e.conftest import FinishedRun
from tests.e2e.launch import flow_states, policy_bytes, records

pytestmark = pytest.mark.thorough
ATTACKS = (
    Attack("rollout", "generate"),
    Attack("flow", "score"),
    Attack("training", "advantages"),
    Attack("flow", "update"),
    Attack("scoring", "score"),
    Attack("flow", "mid-write"),
)


def test_six_kills_one_per_stage_change_no_byte(longer: FinishedRun, tmp_path: Path) -> None:
    numbers = random.Random(0)
    # Full checkpoints are rarer than in the undisturbed run: what was lost between two of them is replayed.
    options = ["iterations=8", "update.decay_iterations=4", "checkpoint.every=3"]
    run = Victim(tmp_path, [part for text in options for part in ("--set", text)])
    for attack in ATTACKS:
        outcome = run.suffer(attack, delay(attack, numbers))
        assert outcome is not None, f"the run was done before {attack}"
        assert outcome.orphans == 0, attack
        assert outcome.half_artifacts == 0, attack
    run.finish()
    assert run.starts == 1 + sum(attack.victim == "flow" for attack in ATTACKS)
    assert run.half_artifacts() == 0
    assert list(run.processes()) == []
    assert len(policies(run.store)) == 9
    for ours, theirs in zip(records(tmp_path, RUN), records(longer.home, longer.name), strict=True):
        assert policy_bytes(tmp_path, ours) == policy_bytes(longer.home, theirs)
        assert ours["position"] == theirs["position"]
    assert sorted({record["lease"] for record in records(tmp_path, RUN)}) == list(range(1, run.starts + 1))
    assert flow_states(tmp_path) == {"Crashed": run.starts - 1, "Completed": 1}  # no page says Running for ever
