"""The gates of a promotion at their limits, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppo_core.spec import PromotionSpec
from tasks.policies.compare_policies import ComparisonRef
from tasks.policies.gates import gain_gate, kl_gate, length_gate
from tasks.policies.policy import Policy


def comparison(**metrics: float) -> ComparisonRef:
    """Of ten prompts; the gain is 0.05, between -0.01 and 0.11, and responses grow from 10 tokens to 12."""
    measured = {"gain": 0.05, "gain_low": -0.01, "gain_high": 0.11, "candidate_length": 12.0, "champion_length": 10.0}
    return ComparisonRef(
        kind="comparison",
        uri=f"artifact://comparison/{'c' * 64}",
        digest="c" * 64,
        metrics={f"promotion/{name}": value for name, value in {**measured, **metrics}.items()},
        pairs=10,
        unscored=0,
        better=6,
        worse=4,
    )


@pytest.mark.parametrize(
    ("low", "min_gain", "passed"),
    [(-0.01, 0.0, False), (0.0, 0.0, False), (0.001, 0.0, True), (0.02, 0.02, False), (0.021, 0.02, True)],
)
def test_the_whole_interval_of_the_gain_must_lie_above_the_limit(low: float, min_gain: float, passed: bool) -> None:
    gate = gain_gate(PromotionSpec(min_gain=min_gain), comparison(gain_low=low))
    assert gate.passed is passed
    assert gate.text.startswith("score +0.0500")
    assert f"interval {low:+.4f} to +0.1100 over 10 prompts" in gate.text


@pytest.mark.parametrize(("confidence", "told"), [(0.95, "95%"), (0.975, "97.5%"), (0.999, "99.9%"), (0.57, "57%")])
def test_the_interval_is_told_with_its_confidence(confidence: float, told: str) -> None:
    gate = gain_gate(PromotionSpec(confidence=confidence), comparison(gain_low=0.1))
    assert f", {told} interval +0.1000 to" in gate.text


@pytest.mark.parametrize(
    ("before", "limit", "passed"), [(10.0, 1.2, True), (10.0, 1.19, False), (10.0, None, None), (0.0, 9.0, False)]
)
def test_responses_may_grow_to_the_limit(before: float, limit: float | None, passed: bool | None) -> None:
    gate = length_gate(PromotionSpec(max_length_growth=limit), comparison(champion_length=before))
    assert gate.passed is passed
    assert gate.text.startswith(f"{before:.1f} to 12.0 tokens per response, {'1.20' if before else 'inf'} times")


@pytest.mark.parametrize(("limit", "passed"), [(5.0, True), (4.99, False), (None, None)])
def test_the_divergence_may_be_as_large_as_the_limit(limit: float | None, passed: bool | None) -> None:
    candidate: Any = SimpleNamespace(divergence=lambda: (5.0, "on its own responses, in iteration 2"))
    assert kl_gate(PromotionSpec(max_kl=limit), cast(Policy, candidate)).passed is passed
