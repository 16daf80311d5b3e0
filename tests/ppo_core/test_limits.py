"""What the switches of PPO become in their limits, and what must not change them: order, padding, scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.algorithms.algorithm import Algorithm, Batch
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.vapo import vapo
from ppo_core.losses import policy_loss
from ppo_core.masking import scale
from ppo_core.records import RolloutRow, ScoreRow
from ppo_core.spec import AdvantageSpec, VapoSpec
from ppo_core.training.experience import Experience, Predictions, build_experience
from ppo_core.training.shaping import moments_with
from tests.ppo_core.test_losses import draw, seeds

LENGTHS = (3, 1, 5, 2, 4)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"whiten": "minibatch", "gae_lambda_alpha": 0.5, "critic_gae_lambda": 1.0},
    {"whiten_centred": False, "whiten_rewards": True, "truncated": "bootstrap"},
    {"score_norm": "mean_std", "score_clip": 1.0, "overlong": {"buffer": 3}, "kl": {"length_normalised": True}},
]


def sampled(seed: int, order: list[int]) -> tuple[list[RolloutRow], list[ScoreRow], Predictions]:
    """Five responses in some order, one of them without a score, with random numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn((4, len(LENGTHS), max(LENGTHS)), generator=generator)
    rows = [
        RolloutRow(str(i), 0, [2], [3] * n, "w", [-1.0] * n, "length" if i == 2 else "stop")
        for i, n in enumerate(LENGTHS)
    ]
    scores = [None if i == 3 else float(numbers[3, i, 0]) for i in range(len(LENGTHS))]
    told = [ScoreRow(str(i), 0, score, {}, False, None) for i, score in enumerate(scores)]
    logprobs, reference, values = numbers[:3, order]
    final = numbers[3, order, 1]
    return [rows[i] for i in order], [told[i] for i in order], Predictions(logprobs, reference, values, final)


def experience(
    seed: int, order: list[int], settings: dict[str, Any], *, times: float = 1.0, algorithm: Algorithm = PPO
) -> Experience:
    rollouts, scores, predictions = sampled(seed, order)
    scores = [ScoreRow(s.prompt_id, 0, None if s.score is None else times * s.score, {}, False, None) for s in scores]
    spec = AdvantageSpec.model_validate(settings)
    made, _ = build_experience(
        rollouts,
        scores,
        predictions,
        algorithm,
        spec,
        kl_coef=0.1,
        max_response_tokens=5,
        moments=moments_with({}, scores),
    )
    return made


@pytest.mark.parametrize("algorithm", [PPO, vapo(VapoSpec(correct_score=0.0))], ids=["ppo", "vapo"])
@pytest.mark.parametrize("settings", SETTINGS)
@given(seed=seeds, order=st.permutations(range(len(LENGTHS))))
def test_the_order_of_the_responses_changes_nothing(
    algorithm: Algorithm, settings: dict[str, Any], seed: int, order: list[int]
) -> None:
    rows = list(range(len(LENGTHS)))
    whole, other = (experience(seed, one, settings, algorithm=algorithm) for one in (rows, order))
    for name in ("rewards", "advantages", "returns"):
        torch.testing.assert_close(vars(other)[name], vars(whole)[name][order], rtol=1e-4, atol=1e-5)
    if whole.imitated is not None and other.imitated is not None:
        assert torch.equal(other.imitated, whole.imitated[order])


@given(seed=seeds, times=st.floats(0.01, 100.0))
def test_normalised_scores_do_not_depend_on_the_scale_of_the_reward(seed: int, times: float) -> None:
    settings = {"score_norm": "std", "whiten": False}
    rows = list(range(len(LENGTHS)))
    one, other = experience(seed, rows, settings), experience(seed, rows, settings, times=times)
    torch.testing.assert_close(other.rewards, one.rewards, rtol=1e-4, atol=1e-5)


@given(seed=seeds, gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_with_lambda_1_and_values_of_zero_ppo_is_reinforce(seed: int, gamma: float) -> None:
    """A_t = sum_{s >= t} gamma^(s - t) r_s, over the tokens that count; whatever lambda the critic has."""
    rewards, _, _, _, mask = draw(seed)
    zeros = torch.zeros_like(rewards)
    batch = Batch(rewards, mask, mask[:, 0], torch.arange(len(mask)), zeros, zeros[:, 0])
    spec = AdvantageSpec(gamma=gamma, gae_lambda=1.0, critic_gae_lambda=0.3)
    found = PPO.estimate(batch, spec).advantages
    for b in range(len(mask)):
        slots = [t for t in range(mask.shape[1]) if mask[b, t]]
        for place, t in enumerate(slots):
            expected = sum(float(rewards[b, s]) * gamma**n for n, s in enumerate(slots[place:]))
            assert float(found[b, t]) == pytest.approx(expected, abs=1e-9)


@given(seeds)
def test_a_dual_clip_at_infinity_is_none(seed: int) -> None:
    logprobs, old, advantages, _, mask = draw(seed)

    def loss(dual_clip: float | None) -> Tensor:
        return policy_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)

    assert torch.equal(loss(1e30), loss(None))


@given(seeds, st.floats(0.1, 1000.0))
def test_what_is_scaled_keeps_its_sign_and_forgets_its_scale(seed: int, times: float) -> None:
    x, _, _, _, mask = draw(seed)
    scaled = scale(x, mask)
    assert torch.equal(scaled.sign(), torch.where(mask, x.sign(), 0.0))
    torch.testing.assert_close(scale(times * x, mask), scaled, rtol=1e-4, atol=1e-6)
    assert float((scaled[mask] ** 2).mean()) == pytest.approx(1.0, rel=1e-4)
