"""What scores in parts become: rewards at their tokens and advantages, against loops in float64 over plain lists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ppo_core.algorithms.grpo import grpo
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.reinforce import reinforce
from ppo_core.algorithms.rloo import RLOO
from ppo_core.records import InputError, RolloutRow, ScoreRow
from ppo_core.rewards import ScoreMoments
from ppo_core.spec import AdvantageSpec, GrpoSpec, ReinforceSpec
from ppo_core.training import shaping
from ppo_core.training.experience import Experience, Predictions, build_experience

LENGTHS, WIDTH, LIMIT = [4, 6, 3, 5], 6, 6
FINISHED = [True, False, True, True]
# Row 1 is cut at the limit; row 2 has its score in one piece; row 3 has none.
PARTS: list[dict[int, float] | None] = [{0: 1.0, 2: -0.5, 3: 2.0}, {1: 4.0, 2: 5.0}, None, None]
SCORES: list[float | None] = [2.5, 9.0, -1.5, None]
MEAN, STD = 0.75, 1.6
GAMMA, LAMBDA, COEF = 0.9, 0.8, 0.1
SETTINGS: list[dict[str, Any]] = [
    {},
    {"score_norm": "std"},
    {"score_norm": "mean_std", "score_clip": 2.0},
    {"score_clip": 2.0, "missing_eos_penalty": 0.5, "overlong": {"buffer": 4, "penalty": 0.8}},
    {"score_norm": "mean_std", "score_clip": 0.5, "truncated": "mask"},
]
ROLLOUTS = [
    RolloutRow("ab"[row // 2], row % 2, [3], [5] * length, "", [-1.0] * length, "stop" if done else "length")
    for row, (length, done) in enumerate(zip(LENGTHS, FINISHED, strict=True))
]
IN_PARTS = [
    ScoreRow(row.prompt_id, row.sample_index, score, {"f": score}, False, None, parts)
    for row, score, parts in zip(ROLLOUTS, SCORES, PARTS, strict=True)
]
IN_ONE_PIECE = [replace(row, token_scores=None) for row in IN_PARTS]
NUMBERS = np.random.default_rng(0).normal(size=(3, len(LENGTHS), WIDTH))
# Scores of which nothing is a part of this iteration, with that mean and deviation.
MOMENTS = ScoreMoments(5.0, MEAN, 4 * STD**2)


def built(scores: list[ScoreRow], algorithm: Any = PPO, **settings: Any) -> tuple[Experience, dict[str, float]]:
    old, reference, values = torch.tensor(NUMBERS, dtype=torch.float32)
    given = {"whiten": False, "gamma": GAMMA, "gae_lambda": LAMBDA, **settings}
    return build_experience(
        ROLLOUTS,
        scores,
        Predictions(old, reference, values, torch.zeros(len(LENGTHS))),
        algorithm,
        AdvantageSpec.model_validate(given),
        kl_coef=COEF,
        max_response_tokens=LIMIT,
        moments=MOMENTS,
    )


def plain_rewards(row: int, settings: dict[str, Any]) -> list[float]:
    """Of a response's tokens: parts over the deviation, scaled alike where their sum is cut; the rest at its end."""
    score, norm = SCORES[row], settings.get("score_norm", "none")
    if score is None or (settings.get("truncated") == "mask" and not FINISHED[row]):
        return []
    unit, shift = 1.0 if norm == "none" else STD, MEAN if norm == "mean_std" else 0.0
    worth = (score - shift) / unit
    limit = settings.get("score_clip", math.inf)
    factor = limit / abs(worth) if abs(worth) > limit else 1.0
    last = LENGTHS[row] - 1
    parts = PARTS[row] or {last: score}
    rewards = [parts.get(t, 0.0) / unit * factor for t in range(LENGTHS[row])]
    rewards[last] -= shift / unit * factor
    if not FINISHED[row]:
        rewards[last] -= settings.get("missing_eos_penalty", 0.0)
    if "overlong" in settings:
        buffer, penalty = settings["overlong"]["buffer"], settings["overlong"]["penalty"]
        rewards[last] -= penalty * min(max(LENGTHS[row] - (LIMIT - buffer), 0) / buffer, 1.0)
    return [r - COEF * (NUMBERS[0, row, t] - NUMBERS[1, row, t]) for t, r in enumerate(rewards)]


def plain_gae(rewards: list[float], values: list[float]) -> list[float]:
    """Sums over later deltas, each by its own power of gamma lambda."""
    following = [*values[1 : len(rewards)], 0.0]
    deltas = [r + GAMMA * after - v for r, v, after in zip(rewards, values, following, strict=False)]
    return [sum((GAMMA * LAMBDA) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (WIDTH - len(row)) for row in rows], dtype=torch.float32)


def assert_as_in_the_loops(settings: dict[str, Any]) -> None:
    experience, _ = built(IN_PARTS, **settings)
    rewards = [plain_rewards(row, settings) for row in range(len(LENGTHS))]
    torch.testing.assert_close(experience.rewards, padded(rewards), rtol=0, atol=1e-5)
    advantages = [plain_gae(row, values) for row, values in zip(rewards, NUMBERS[2].tolist(), strict=True)]
    torch.testing.assert_close(experience.advantages, padded(advantages), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS)
def test_advantages_follow_from_where_the_parts_are(settings: dict[str, Any]) -> None:
    assert_as_in_the_loops(settings)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda parts: parts.roll(1, dims=1),
        lambda parts: -parts,
        lambda parts: torch.zeros_like(parts),
    ],
)
def test_parts_at_other_places_are_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    right = shaping.parts_of
    monkeypatch.setattr("ppo_core.training.shaping.parts_of", lambda *given: wrong(right(*given)))
    with pytest.raises(AssertionError):
        assert_as_in_the_loops({})


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_response_in_parts_is_worth_what_it_is_in_one_piece(settings: dict[str, Any]) -> None:
    (parts, told), (whole, of_whole) = built(IN_PARTS, **settings), built(IN_ONE_PIECE, **settings)
    assert not torch.equal(parts.rewards, whole.rewards)
    torch.testing.assert_close(parts.rewards.sum(1), whole.rewards.sum(1), rtol=0, atol=1e-5)
    assert told["reward/mean"] == pytest.approx(of_whole["reward/mean"], abs=1e-5)


def test_a_score_in_one_piece_is_the_same_beside_others_in_parts() -> None:
    parts, whole = built(IN_PARTS)[0], built(IN_ONE_PIECE)[0]
    assert torch.equal(parts.rewards[2:], whole.rewards[2:])
    assert torch.equal(parts.advantages[2:], whole.advantages[2:])


@pytest.mark.parametrize("algorithm", [RLOO, grpo(GrpoSpec())])
def test_groups_compare_the_sums_of_parts(algorithm: Any) -> None:
    parts, whole = built(IN_PARTS, algorithm)[0], built(IN_ONE_PIECE, algorithm)[0]
    assert parts.advantages.abs().max() > 0.1
    torch.testing.assert_close(parts.advantages, whole.advantages, rtol=0, atol=1e-5)


def test_what_is_still_to_come_of_the_parts_is_reinforces_reward() -> None:
    rewards = [plain_rewards(row, {}) for row in range(len(LENGTHS))]
    to_go = [[sum(GAMMA ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))] for row in rewards]
    experience, _ = built(IN_PARTS, reinforce(ReinforceSpec(baseline="none")), gae_lambda=0.95)
    torch.testing.assert_close(experience.advantages, padded(to_go), rtol=0, atol=1e-5)


def test_what_pays_for_its_length_is_counted_among_what_is_learned_from() -> None:
    """Lengths 4, 6, 3, 5 and a buffer of 2 below 6: the second pays, and the last, which has no score."""
    overlong = {"buffer": 2, "penalty": 1.0}
    assert built(IN_ONE_PIECE, overlong=overlong)[1]["reward/overlong"] == pytest.approx(1 / 3)
    assert built(IN_ONE_PIECE, overlong=overlong, truncated="mask")[1]["reward/overlong"] == 0.0


@pytest.mark.parametrize("score", [-1e30, 1e16])
def test_a_score_whose_square_does_not_fit_is_refused_and_can_be_clipped(score: float) -> None:
    """Whitened with it, all advantages were 0."""
    scores = [replace(IN_ONE_PIECE[0], score=score), *IN_ONE_PIECE[1:]]
    with pytest.raises(InputError, match=r"is worth 1e\+(30|16), .* beyond 1e\+15 .*: set advantages.score_clip"):
        built(scores, whiten=True)
    experience, _ = built(scores, whiten=True, score_clip=5.0)
    assert float(experience.advantages.abs().max()) > 0
