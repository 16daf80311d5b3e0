"""What an iteration hands on, by the training engine's handlers: moments of scores, prices of divergence."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.ppo_core.plain_torch import padded, plain_logprobs
from tests.ppo_core.tiny_models import tiny_policy
from tests.ppo_core.training.programs.carry_program import (
    HORIZON,
    KL_COEF,
    PENALTY_COEF,
    SEQUENCES,
    TARGET,
    TEMPERATURES,
)
from tests.ppo_core.training.update_cases import facts_of

TRAINED = {0: 3.0, 1: 1.0, 4: 4.0, 5: 2.0}
"""The scores of the rows that have one and an end of their own."""
FIRST = [4.0, 8.0, *TRAINED.values()]
SECOND = [*FIRST, *TRAINED.values()]


def logprobs_by(policy: Any) -> Tensor:
    """[B, R] in float64, each row at a temperature of its own."""
    pairs = zip(SEQUENCES, TEMPERATURES, strict=True)
    with torch.no_grad():
        rows = [plain_logprobs(policy, [sequence], temperature)[0] for sequence, temperature in pairs]
    return padded(rows, max(map(len, rows)))


def logprobs_of(seed: int) -> Tensor:
    """[B, R] of tiny_policy(seed): the policy is 0, the reference 1."""
    return logprobs_by(tiny_policy("llama-tied", seed=seed))


def kl_by_hand() -> float:
    """The mean over the rows that are trained on of the sum of their log-ratios."""
    ratios = logprobs_of(0) - logprobs_of(1)
    return statistics.fmean(float(ratios[row].sum()) for row in TRAINED)


@pytest.mark.parametrize(("name", "scores"), [("adaptive", FIRST), ("scheduled", SECOND)])
def test_the_moments_go_on_over_the_scores_that_were_trained_on(carried: Path, name: str, scores: list[float]) -> None:
    said = facts_of(carried, "runs")[name]
    mean = statistics.fmean(scores)
    deviations = sum((score - mean) ** 2 for score in scores)
    assert said["carried"] == pytest.approx({"seen": len(scores), "mean": mean, "deviations": deviations}, rel=1e-9)
    assert said["metrics"]["reward/score_mean"] == pytest.approx(mean)
    assert said["metrics"]["reward/score_std"] == pytest.approx(statistics.stdev(scores))


@pytest.mark.parametrize(("name", "scores", "coef"), [("adaptive", FIRST, 0.2), ("scheduled", SECOND, 0.15)])
def test_rewards_are_at_the_price_of_their_iteration(
    carried: Path, name: str, scores: list[float], coef: float
) -> None:
    """0.2, after one of four iterations of the line to 0 0.15; scores in deviations of all so far."""
    experience, price = load_file(carried / name / "experience.safetensors"), logprobs_of(0) - logprobs_of(1)
    expected = torch.zeros_like(price)
    for row, score in TRAINED.items():
        length = len(SEQUENCES[row][1])
        expected[row, :length] = -coef * price[row, :length]
        expected[row, length - 1] += score / statistics.stdev(scores)
    torch.testing.assert_close(experience["rewards"].double(), expected, rtol=0, atol=1e-5)
    assert facts_of(carried, "runs")[name]["metrics"]["kl/coef"] == pytest.approx(coef)


def test_logprobs_are_at_the_temperatures_of_their_rows(carried: Path) -> None:
    experience = load_file(carried / "adaptive/experience.safetensors")
    for name, seed in {"old_logprobs": 0, "reference_logprobs": 1}.items():
        torch.testing.assert_close(experience[name].double(), logprobs_of(seed), rtol=0, atol=1e-5)


def test_an_adaptive_coefficient_moves_once_the_policy_is_trained(carried: Path) -> None:
    """Four responses of a horizon of 50, by a relative error that no limit cuts."""
    observed = kl_by_hand()
    error = observed / TARGET - 1
    assert 0.01 < abs(error) < 0.2
    said = facts_of(carried, "runs")["adaptive"]
    assert said["metrics"]["kl/reference"] == pytest.approx(observed, abs=1e-5)
    assert said["next_kl_coef"] == pytest.approx(KL_COEF * (1 + error * len(TRAINED) / HORIZON), abs=1e-7)
    assert facts_of(carried, "runs")["critic alone"]["next_kl_coef"] == KL_COEF
    assert facts_of(carried, "runs")["scheduled"]["next_kl_coef"] == KL_COEF  # the schedule counts from where it began


@pytest.mark.parametrize(("name", "factor"), [("near", 0.5), ("far", 2.0)])
def test_the_price_of_the_old_policy_moves_with_each_update(carried: Path, name: str, factor: float) -> None:
    """By rho - 1 - log rho at the tokens that count, of the policy that the update ended with."""
    said, policy = facts_of(carried, "runs")[name], AutoModelForCausalLM.from_pretrained(carried / name / "policy")
    assert said["carried"] == {"coef": PENALTY_COEF * factor}
    moved = logprobs_by(policy) - logprobs_of(0)
    ratios = [float(ratio) for row in TRAINED for ratio in moved[row, : len(SEQUENCES[row][1])]]
    divergence = statistics.fmean(math.exp(ratio) - 1 - ratio for ratio in ratios)
    assert said["metrics"]["policy/kl_to_old"] == pytest.approx(divergence, abs=1e-5)


def test_what_begins_with_other_networks_has_no_reference_beside_it(carried: Path) -> None:
    found = facts_of(carried, "runs")["reference"]
    assert found["held"] > 0
    assert found["left"] == 0


def test_without_a_step_of_the_policy_it_stays(carried: Path) -> None:
    said = facts_of(carried, "runs")["no step"]
    assert said["metrics"]["policy/skipped_steps"] == said["metrics"]["critic/skipped_steps"] + 1 == 1
    assert said["carried"] == {"coef": PENALTY_COEF}
    assert "policy/kl_to_old" not in said["metrics"]


@pytest.mark.parametrize(
    ("name", "why", "remedy"),
    [
        ("all cut", "advantages.truncated=mask left out every response", "raise that, or set truncated to terminal"),
        ("none scored", "none of 6 responses has a score", "lower reward.max_failed_fraction"),
    ],
)
def test_nothing_to_learn_from_is_refused(carried: Path, name: str, why: str, remedy: str) -> None:
    said = facts_of(carried, "runs")[name]["said"]
    assert said.startswith(f"there is nothing to learn from: {why}")
    assert remedy in said
    assert not (carried / name / "experience.safetensors").exists()
