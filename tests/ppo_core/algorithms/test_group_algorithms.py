"""GRPO and REINFORCE against their papers, by float64 loops; and the limits in which one algorithm is another."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.algorithms import grpo, reinforce, rloo
from ppo_core.algorithms.algorithm import Batch
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.registry import algorithm_of
from ppo_core.masking import whiten
from ppo_core.records import RolloutRow, ScoreRow
from ppo_core.spec import AdvantageSpec, GrpoSpec, ReinforceSpec, RunSpec
from ppo_core.training.experience import Predictions, build_experience
from tests.ppo_core.algorithms.test_rloo import COUNTED, PROMPTS, batch, mutated
from tests.ppo_core.spec.refused_specs import SMALLEST

SPEC = AdvantageSpec(whiten=False)
ROWS = range(len(PROMPTS))


def plain_rewards(given_: Batch) -> list[float]:
    return [sum(float(given_.rewards[i, t]) for t in range(4) if given_.response_mask[i, t]) for i in ROWS]


def plain_grpo(given_: Batch, *, scaled: bool) -> list[float]:
    """(R_i - mean) / (std + 1e-4) over the responses of the group that count; 0 without another one."""
    rewards, counts = plain_rewards(given_), [bool(given_.response_mask[i].any()) for i in ROWS]
    found = []
    for i in ROWS:
        group = [rewards[j] for j in ROWS if counts[j] and PROMPTS[j] == PROMPTS[i]]
        if not counts[i] or len(group) < 2:
            found.append(0.0)
            continue
        mean = sum(group) / len(group)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
        found.append((rewards[i] - mean) / (std + 1e-4 if scaled else 1.0))
    return found


def assert_grpo_of_the_paper(estimate: Any, seed: int, *, scaled: bool) -> None:
    given_ = batch(seed)
    advantages, returns, measured = estimate(given_, SPEC, scaled=scaled)
    expected = torch.tensor(plain_grpo(given_, scaled=scaled))[:, None].expand(-1, 4)
    torch.testing.assert_close(advantages, torch.where(given_.response_mask, expected, 0.0), rtol=0, atol=1e-5)
    assert returns is None
    assert measured == {"advantage/alone": pytest.approx(2 / 7)}


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_grpo_is_that_of_the_paper(seed: int, scaled: bool) -> None:
    assert_grpo_of_the_paper(grpo.estimate, seed, scaled=scaled)


@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("of_scores / (std", "-of_scores / (std"),
        ("(groups.sizes - 1).clamp(min=1)).sqrt()", "groups.sizes.clamp(min=1)).sqrt()"),
        ("std + SMALLEST_DEVIATION", "std * std + SMALLEST_DEVIATION"),
    ],
)
def test_a_wrong_grpo_is_noticed(original: str, replacement: str) -> None:
    with pytest.raises(AssertionError):
        assert_grpo_of_the_paper(mutated(grpo, original, replacement).estimate, 0, scaled=True)


def assert_price_beside_the_scaled_scores(estimate: Any) -> None:
    """(S_i - mean S) / (std S + 1e-4) - (P_i - mean P), where a response's reward is S - P."""
    given_ = batch(6)
    prices = torch.rand(given_.rewards.shape, generator=torch.Generator().manual_seed(7))
    credits, paid = given_._replace(credits=given_.rewards), given_._replace(rewards=prices)
    scaled, priced = plain_grpo(credits, scaled=True), plain_grpo(paid, scaled=False)
    expected = torch.tensor([s - p for s, p in zip(scaled, priced, strict=True)])[:, None].expand(-1, 4)
    found = estimate(credits._replace(rewards=given_.rewards - prices), SPEC, scaled=True).advantages
    torch.testing.assert_close(found, torch.where(given_.response_mask, expected, 0.0), rtol=0, atol=1e-5)


def test_the_price_of_divergence_is_not_divided_by_the_deviation() -> None:
    assert_price_beside_the_scaled_scores(grpo.estimate)
    with pytest.raises(AssertionError):
        assert_price_beside_the_scaled_scores(mutated(grpo, "- price", "+ price").estimate)


def plain_reinforce(given_: Batch, gamma: float, *, centred: bool) -> list[list[float]]:
    """sum_{s >= t} gamma^(s - t) r_s over the tokens that count, less the mean reward of the responses that count."""
    mask = given_.response_mask.tolist()
    counted = [i for i in ROWS if any(mask[i])]
    baseline = sum(plain_rewards(given_)[i] for i in counted) / len(counted) if centred else 0.0
    found = []
    for i in ROWS:
        tokens = [t for t in range(4) if mask[i][t]]
        row = [0.0] * 4
        for place, t in enumerate(tokens):
            later = [float(given_.rewards[i, s]) * gamma**distance for distance, s in enumerate(tokens[place:])]
            row[t] = sum(later) - baseline
        found.append(row)
    return found


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_is_the_reward_to_go(gamma: float, centred: bool) -> None:
    given_ = batch(3)
    estimate = reinforce.estimate(given_, AdvantageSpec(gamma=gamma), centred=centred)
    expected = torch.tensor(plain_reinforce(given_, gamma, centred=centred))
    torch.testing.assert_close(estimate.advantages, expected, rtol=0, atol=1e-5)
    assert estimate.returns is None


@pytest.mark.parametrize(
    ("original", "replacement"), [("to_go - baseline", "to_go + baseline"), ("gae_lambda=1.0", "gae_lambda=0.5")]
)
def test_a_wrong_reinforce_is_noticed(original: str, replacement: str) -> None:
    given_ = batch(3)
    found = mutated(reinforce, original, replacement).estimate(given_, AdvantageSpec(), centred=True)
    expected = torch.tensor(plain_reinforce(given_, 1.0, centred=True))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.advantages, expected, rtol=0, atol=1e-5)


def test_whitened_the_baseline_of_reinforce_cancels() -> None:
    given_ = batch(1)
    estimates = [reinforce.estimate(given_, SPEC, centred=centred).advantages for centred in (True, False)]
    one, other = (whiten(advantages, given_.response_mask) for advantages in estimates)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_ppo_with_lambda_1_and_a_critic_that_knows_nothing_is_reinforce() -> None:
    given_ = batch(2)
    silent = given_._replace(values=torch.zeros_like(given_.rewards), final_values=torch.zeros(len(COUNTED)))
    ppo = PPO.estimate(silent, AdvantageSpec(gae_lambda=1.0, gamma=0.9)).advantages
    assert torch.equal(ppo, reinforce.estimate(given_, AdvantageSpec(gamma=0.9), centred=False).advantages)


@given(seed=st.integers(0, 99), samples=st.integers(2, 6))
def test_unscaled_grpo_is_rloo_but_for_a_constant(seed: int, samples: int) -> None:
    """R - mean of all k is (k - 1) / k times R - mean of the k - 1 others."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones((samples, 1), dtype=torch.bool)
    rewards = torch.randn((samples, 1), generator=generator)
    one = Batch(rewards, mask, mask[:, 0], torch.zeros(samples, dtype=torch.long))
    expected = rloo.estimate(one, SPEC).advantages * (samples - 1) / samples
    torch.testing.assert_close(grpo.estimate(one, SPEC, scaled=False).advantages, expected, rtol=0, atol=1e-5)


@given(reward=st.floats(-100, 100, width=32), samples=st.integers(2, 9), scaled=st.booleans())
def test_a_group_of_equal_rewards_teaches_exactly_nothing(reward: float, samples: int, scaled: bool) -> None:
    mask = torch.ones((samples, 1), dtype=torch.bool)
    equal = Batch(torch.full((samples, 1), reward), mask, mask[:, 0], torch.zeros(samples, dtype=torch.long))
    assert grpo.estimate(equal, SPEC, scaled=scaled).advantages.tolist() == [[0.0]] * samples


def advantages_of(algorithm: dict[str, Any], advantages: dict[str, Any], *, drift: float = 0.0) -> list[list[float]]:
    """Per response, of a prompt with both answers right and of one with an answer right, of several lengths; each token
    has `drift` nats to the reference."""
    spec = RunSpec.model_validate(
        {**SMALLEST, "algorithm": algorithm, "rollout": {"samples_per_prompt": 2}, "advantages": advantages}
    )
    lengths, scores = (8, 2, 3, 5), (1.0, 1.0, 1.0, 0.0)
    rows = [RolloutRow("ab"[i // 2], i % 2, [3], [5] * n, "", [-1.0] * n, "stop") for i, n in enumerate(lengths)]
    scored = [ScoreRow("ab"[i // 2], i % 2, score, {}, False, None) for i, score in enumerate(scores)]
    predictions = Predictions(torch.full((4, 8), -1.0), torch.full((4, 8), -1.0 - drift))
    made = algorithm_of(spec.algorithm)
    found, _ = build_experience(rows, scored, predictions, made, spec.advantages, kl_coef=0.01, max_response_tokens=8)
    assert spec.advantages.minibatch_whitening != "centred"
    return [row[:n].tolist() for row, n in zip(found.advantages, lengths, strict=True)]


@pytest.mark.parametrize("advantages", [{}, {"whiten": True, "whiten_centred": False}])
@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_prompt_without_a_signal_has_advantage_0(kind: str, advantages: dict[str, Any]) -> None:
    right, also_right, better, worse = advantages_of({"kind": kind}, advantages)
    assert (right, also_right) == ([0.0] * 8, [0.0] * 2)
    assert better[0] == pytest.approx(-worse[0])
    assert better[0] > 0.5


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_of_responses_of_one_score_the_divergence_says_no_more_than_its_price(kind: str) -> None:
    found = advantages_of({"kind": kind}, {}, drift=0.5)
    # The first of prompt a is 8 tokens of 0.5 nats, the other 2, at 0.01 a nat: 0.02 and 0.005 from their mean.
    assert 0 > found[0][0] > -0.04
    assert found[1][0] == pytest.approx(-found[0][0])
    assert found[2][0] > 0.5


def test_where_the_spec_does_not_say_reinforce_is_whitened_and_rloo_is_not() -> None:
    assert [row[0] for row in advantages_of({"kind": "rloo"}, {})] == [0.0, 0.0, 1.0, -1.0]
    found = [x for row in advantages_of({"kind": "reinforce"}, {}) for x in row]
    assert statistics.fmean(found) == pytest.approx(0.0, abs=1e-6)
    assert statistics.stdev(found) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "grpo unscaled", "reinforce", "rloo"])
def test_the_order_of_the_responses_and_their_padding_do_not_matter(name: str) -> None:
    estimates = {
        "grpo": partial(grpo.estimate, scaled=True),
        "grpo unscaled": partial(grpo.estimate, scaled=False),
        "reinforce": partial(reinforce.estimate, centred=True),
        "rloo": rloo.estimate,
    }
    given_ = batch(4)
    order = torch.randperm(len(COUNTED), generator=torch.Generator().manual_seed(0))
    padded = Batch(
        torch.nn.functional.pad(given_.rewards[order], (0, 3), value=7.0),
        torch.nn.functional.pad(given_.response_mask[order], (0, 3)),
        given_.finished[order],
        given_.prompts[order],
    )
    found = estimates[name](padded, SPEC).advantages[:, :4]
    torch.testing.assert_close(found, estimates[name](given_, SPEC).advantages[order], rtol=0, atol=1e-6)


def test_a_spec_names_an_algorithm_with_its_settings() -> None:
    given_ = batch()
    for scale in ("std", "none"):
        found = algorithm_of(GrpoSpec.model_validate({"scale": scale})).estimate(given_, SPEC)
        assert torch.equal(found.advantages, grpo.estimate(given_, SPEC, scaled=scale == "std").advantages)
    for baseline in ("batch_mean", "none"):
        found = algorithm_of(ReinforceSpec.model_validate({"baseline": baseline})).estimate(given_, SPEC)
        expected = reinforce.estimate(given_, SPEC, centred=baseline == "batch_mean")
        assert torch.equal(found.advantages, expected.advantages)
        assert found.measured == expected.measured
