"""Three rollouts, worked out by hand from scores to whitened advantages.

Row 0 ended by itself with a score of 7, row 1 was cut with a score of 1, row 2 could not be scored. Score clip 5,
missing-EOS penalty 0.5, KL coefficient 0.1, gamma 1, lambda 0.5:

    k1      [0.5, -0.5]      [1, 0, 0]       (row 2 counts nowhere)
    rewards [-0.05, 5.05]    [-0.1, 0, 0.5]
    values  [1, 2]           [0.5, 0.5, 0.5]
    deltas  [0.95, 3.05]     [-0.1, 0, 0]    row 1 with the critic's final value of 2: [-0.1, 0, 2]
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_core.algorithms.algorithm import Algorithm
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.ppo_shared import ppo_shared
from ppo_core.models.forward import Need
from ppo_core.records import ComputeAdvantagesJob, OptimizerSettings, RolloutRow, ScoreRow
from ppo_core.rewards import ScoreMoments
from ppo_core.spec import AdaptiveKl, AdvantageSpec, FixedKl, ModelSpec, PpoSharedSpec, TrainingSpec, UpdateSpec
from ppo_core.training.experience import (
    Experience,
    Predictions,
    build_experience,
    coefficient_after,
    coefficient_at,
    needed,
    trained_on,
)
from ppo_core.training.shaping import moments_with

ROLLOUTS = [
    RolloutRow("a", 0, [3, 4], [5, 1], "w5", [-1.1, -2.0], "stop"),
    RolloutRow("b", 0, [6], [7, 8, 9], "w7 w8 w9", [-1.0, -1.0, -1.2], "length"),
    RolloutRow("c", 0, [2, 2, 2], [1], "", [-3.0], "stop"),
]
SCORES = [
    ScoreRow("a", 0, 7.0, {"f": 7.0}, False, None),
    ScoreRow("b", 0, 1.0, {"f": 1.0}, True, None),
    ScoreRow("c", 0, None, {"f": None}, False, "not scored by f"),
]
PREDICTIONS = Predictions(
    old_logprobs=torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0], [-3.0, 0.0, 0.0]]),
    reference_logprobs=torch.tensor([[-1.5, -1.5, 0.0], [-2.0, -1.0, -1.0], [-1.0, 0.0, 0.0]]),
    values=torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.5, 0.5], [9.0, 0.0, 0.0]]),
    final_values=torch.tensor([100.0, 2.0, 100.0]),
)
ADVANTAGES = {
    "terminal": [[2.475, 3.05, 0.0], [-0.1, 0.0, 0.0], [0.0, 0.0, 0.0]],
    "bootstrap": [[2.475, 3.05, 0.0], [0.4, 1.0, 2.0], [0.0, 0.0, 0.0]],
    "mask": [[2.475, 3.05, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
}
COUNTED = {"terminal": [2, 3, 0], "bootstrap": [2, 3, 0], "mask": [2, 0, 0]}


def built(truncated: str, **changes: Any) -> tuple[Experience, dict[str, float]]:
    settings = {"score_clip": 5.0, "gae_lambda": 0.5, "whiten": False, **changes}
    if truncated != "mask":
        settings["missing_eos_penalty"] = 0.5
    spec = AdvantageSpec.model_validate({"truncated": truncated, **settings})
    return build_experience(ROLLOUTS, SCORES, PREDICTIONS, PPO, spec, kl_coef=0.1, max_response_tokens=3)


def test_the_samplers_logprobs_take_the_place_of_the_trainers(tmp_path: Path) -> None:
    """KL by hand: [-1.1 + 1.5, -2 + 1.5], [-1 + 2, 0, -1.2 + 1]; row 2 counts nowhere."""
    ours, ours_measured = built("terminal")
    experience, measured = built("terminal", old_logprobs="sampler")
    assert_close(experience.old_logprobs, [[-1.1, -2.0, 0.0], [-1.0, -1.0, -1.2], [-3.0, 0.0, 0.0]])
    assert_close(experience.rewards, [[-0.04, 5.05, 0.0], [-0.1, 0.0, 0.52], [0.0, 0.0, 0.0]])
    assert measured["kl/reference"] == pytest.approx((-0.1 + 0.8) / 2)
    assert {name for name in ours_measured if name.startswith("sampler/")} == ours_measured.keys() - measured.keys()
    assert torch.equal(experience.response_mask, ours.response_mask)
    experience.save(tmp_path)
    assert torch.equal(Experience.load(tmp_path).old_logprobs, experience.sampler_logprobs)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [(PPO, Need(values=True, reference_logprobs=True)), (ppo_shared(PpoSharedSpec()), PPO.predictions)],
)
def test_the_policys_pass_is_spared_unless_values_come_with_it(algorithm: Algorithm, expected: Need) -> None:
    assert needed(algorithm, AdvantageSpec(old_logprobs="sampler")) == expected
    assert needed(algorithm, AdvantageSpec()) == algorithm.predictions


def assert_close(observed: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(observed, torch.tensor(expected), rtol=0, atol=1e-6)


def counting(rows: list[list[float]], truncated: str) -> list[float]:
    return [x for row, count in zip(rows, COUNTED[truncated], strict=True) for x in row[:count]]


@pytest.mark.parametrize("truncated", ADVANTAGES)
def test_masks_rewards_advantages_and_returns(truncated: str) -> None:
    experience, _ = built(truncated)
    assert experience.response_mask.sum(1).tolist() == COUNTED[truncated]
    cut = [0.0, 0.0, 0.0] if truncated == "mask" else [-0.1, 0.0, 0.5]
    assert_close(experience.rewards, [[-0.05, 5.05, 0.0], cut, [0.0, 0.0, 0.0]])
    assert_close(experience.advantages, ADVANTAGES[truncated])
    returns = [[3.475, 5.05, 0.0], [a + 0.5 for a in ADVANTAGES[truncated][1]], [0.0, 0.0, 0.0]]
    assert_close(experience.returns, returns if truncated != "mask" else [returns[0], [0.0] * 3, [0.0] * 3])


@pytest.mark.parametrize("truncated", ADVANTAGES)
def test_whitening_is_over_the_tokens_that_count(truncated: str) -> None:
    advantages = counting(ADVANTAGES[truncated], truncated)
    mean, scale = statistics.fmean(advantages), math.sqrt(statistics.variance(advantages) + 1e-8)
    experience, metrics = built(truncated, whiten=True)
    observed = experience.advantages[experience.response_mask].tolist()
    assert observed == pytest.approx([(a - mean) / scale for a in advantages], abs=1e-5)
    assert experience.advantages[~experience.response_mask].abs().sum() == 0
    assert metrics["advantage/std"] == pytest.approx(statistics.stdev(advantages), abs=1e-5)
    assert_close(experience.returns, built(truncated)[0].returns.tolist())


def test_the_critic_may_learn_from_another_lambda() -> None:
    """With lambda 1 the returns are the sums of what rewards are still to come."""
    experience, metrics = built("terminal", critic_gae_lambda=1.0)
    assert_close(experience.advantages, ADVANTAGES["terminal"])
    assert_close(experience.returns, [[5.0, 5.05, 0.0], [0.4, 0.5, 0.5], [0.0, 0.0, 0.0]])
    returns, values = [5.0, 5.05, 0.4, 0.5, 0.5], [1.0, 2.0, 0.5, 0.5, 0.5]
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    explained = 1 - statistics.variance(errors) / statistics.variance(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_long_responses_may_have_a_larger_lambda() -> None:
    """alpha 1: two tokens have lambda 1/2, three 2/3; the second row's only later delta is 0, or with a value 2."""
    given = {"gae_lambda": 0.95, "gae_lambda_alpha": 1.0}
    assert_close(built("terminal", **given)[0].advantages, ADVANTAGES["terminal"])
    assert_close(built("bootstrap", **given)[0].advantages[1:2], [[-0.1 + 2 * 4 / 9, 4 / 3, 2.0]])


def test_whitening_that_is_not_centred_changes_no_sign() -> None:
    advantages = counting(ADVANTAGES["terminal"], "terminal")
    root = math.sqrt(statistics.fmean(a * a for a in advantages) + 1e-8)
    experience, _ = built("terminal", whiten=True, whiten_centred=False)
    observed = experience.advantages[experience.response_mask].tolist()
    assert observed == pytest.approx([a / root for a in advantages], abs=1e-5)


def test_advantages_that_the_update_whitens_come_as_they_are() -> None:
    assert_close(built("terminal", whiten="minibatch")[0].advantages, ADVANTAGES["terminal"])


def test_whitened_rewards_have_variance_one_and_their_mean() -> None:
    """Rewards [-0.05, 5.05] and [-0.1, 0, 0.5]; with lambda 0 and the values below, advantages are deltas of them."""
    rewards = [-0.05, 5.05, -0.1, 0.0, 0.5]
    mean, scale = statistics.fmean(rewards), math.sqrt(statistics.variance(rewards) + 1e-8)
    r = [(reward - mean) / scale + mean for reward in rewards]
    experience, metrics = built("terminal", whiten_rewards=True, gae_lambda=0.0)
    assert_close(experience.rewards, [[r[0], r[1], 0.0], r[2:], [0.0] * 3])
    deltas = [[r[0] + 2 - 1, r[1] - 2, 0.0], [r[2] + 0.5 - 0.5, r[3] + 0.5 - 0.5, r[4] - 0.5], [0.0] * 3]
    assert_close(experience.advantages, deltas)
    assert metrics["reward/mean"] == built("terminal")[1]["reward/mean"]


@pytest.mark.parametrize("truncated", ADVANTAGES)
def test_the_kl_is_summed_over_a_response_and_what_else_is_measured(truncated: str) -> None:
    _, metrics = built(truncated)
    logs = counting([[-0.5, 0.5, 0.0], [-1.0, 0.0, 0.0], [2.0, 0.0, 0.0]], truncated)
    assert metrics["kl/reference"] == pytest.approx(0.0 if truncated == "mask" else 0.5, abs=1e-6)
    assert metrics["kl/reference_per_token_k3"] == pytest.approx(
        statistics.fmean(math.exp(r) - 1 - r for r in logs), abs=1e-6
    )
    assert metrics["kl/coef"] == 0.1
    assert metrics["reward/mean"] == pytest.approx(5.0 if truncated == "mask" else 2.7, abs=1e-6)
    advantages = counting(ADVANTAGES[truncated], truncated)
    values = counting(PREDICTIONS.values.tolist(), truncated)
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    explained = 1 - statistics.variance(advantages) / statistics.variance(returns)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_the_samplers_disagreement_is_over_every_sampled_token() -> None:
    """Row 0 is off by 0.1, row 1 by 0.2, each at one token of the six; the unscored row 2 agrees and counts."""
    _, metrics = built("mask")
    assert metrics["sampler/logprob_difference_mean"] == pytest.approx(0.3 / 6, abs=1e-6)
    assert metrics["sampler/logprob_difference_max"] == pytest.approx(0.2, abs=1e-6)
    k3 = sum(math.exp(r) - 1 - r for r in (0.1, 0.2)) / 6
    assert metrics["sampler/kl"] == pytest.approx(k3, abs=1e-6)


def test_another_estimator_prices_the_divergence() -> None:
    experience, metrics = built("terminal", kl=FixedKl(estimator="abs"))
    assert_close(experience.rewards, [[-0.05, 4.95, 0.0], [-0.1, 0.0, 0.5], [0.0, 0.0, 0.0]])
    assert metrics["kl/reference"] == pytest.approx(0.5, abs=1e-6)


def normalised(score_norm: str) -> list[float]:
    """Rewards at the last tokens that count: scores 7 and 1 after one of 1 before them, without a price or a clip."""
    before = ScoreMoments().with_scores(torch.tensor([1.0]))
    moments = moments_with(before._asdict(), SCORES)
    spec = AdvantageSpec.model_validate({"score_norm": score_norm})
    experience, metrics = build_experience(
        ROLLOUTS, SCORES, PREDICTIONS, PPO, spec, kl_coef=0.0, max_response_tokens=3, moments=moments
    )
    assert (metrics["reward/score_mean"], metrics["reward/score_std"]) == pytest.approx((3.0, math.sqrt(12)))
    return [float(experience.rewards[0, 1]), float(experience.rewards[1, 2])]


def test_scores_are_normalised_by_all_of_the_run() -> None:
    """1, 7 and 1 have mean 3 and variance (4 + 16 + 4) / 2 = 12; the response without a score is none of them."""
    assert normalised("std") == pytest.approx([7 / math.sqrt(12), 1 / math.sqrt(12)])
    assert normalised("mean_std") == pytest.approx([4 / math.sqrt(12), -2 / math.sqrt(12)])


def test_responses_near_the_limit_lose_score() -> None:
    """Limit 3, buffer 2, penalty 0.5: two tokens cost half of it, three all of it. Row 2 counts nowhere."""
    experience, metrics = built("terminal", overlong={"buffer": 2, "penalty": 0.5})
    assert_close(experience.rewards, [[-0.05, 4.8, 0.0], [-0.1, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert metrics["reward/overlong"] == 1.0
    assert "reward/overlong" not in built("terminal")[1]


def test_a_price_by_length_is_divided_by_the_tokens_that_count() -> None:
    """k1 of [0.5, -0.5] over two tokens, of [1, 0, 0] over three, at 0.1."""
    experience, metrics = built("terminal", kl=FixedKl(length_normalised=True))
    assert_close(experience.rewards, [[-0.025, 5.025, 0.0], [-0.1 / 3, 0.0, 0.5], [0.0, 0.0, 0.0]])
    assert metrics["kl/reference"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(("schedule", "expected"), [("constant", 0.4), ("linear", 0.25), ("cosine", 0.25)])
def test_a_price_with_a_schedule_is_what_it_is_at_the_iteration(schedule: str, expected: float) -> None:
    """Half way from 0.4 to a quarter of it: 0.25 on the line, and on the cosine too."""
    fraction = {} if schedule == "constant" else {"final_fraction": 0.25}
    kl = FixedKl.model_validate({"coef": 0.4, "schedule": schedule, **fraction})
    job = ComputeAdvantagesJob(
        model=ModelSpec(path="policy"),
        temperature=1.0,
        advantages=AdvantageSpec(kl=kl),
        max_response_tokens=3,
        training=TrainingSpec(),
        optimizer=OptimizerSettings.of(UpdateSpec()),
        kl_coef=0.4,
        iteration=3,
        decay_iterations=6,
    )
    assert coefficient_at(job) == pytest.approx(expected)
    assert coefficient_at(job.model_copy(update={"advantages": AdvantageSpec(kl=AdaptiveKl(target=6.0))})) == 0.4


def test_nothing_scored_is_all_zeros_and_finite() -> None:
    unscored = [ScoreRow(row.prompt_id, 0, None, {}, False, "no") for row in SCORES]
    experience, metrics = build_experience(
        ROLLOUTS, unscored, PREDICTIONS, PPO, AdvantageSpec(), kl_coef=0.1, max_response_tokens=3
    )
    assert not experience.response_mask.any()
    assert experience.advantages.abs().sum() == experience.rewards.abs().sum() == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_experience_survives_its_file_and_knows_its_sequences(tmp_path: Path) -> None:
    optional = {"temperatures": torch.tensor([0.5, 1.0, 2.0]), "imitated": torch.tensor([True, False, False])}
    experience = replace(built("terminal")[0], **optional)
    experience.save(tmp_path)
    read = Experience.load(tmp_path)
    for name, tensor in vars(experience).items():
        assert torch.equal(vars(read)[name], tensor), name
    assert read.sequences() == [(row.prompt_token_ids, row.response_token_ids) for row in ROLLOUTS]


@pytest.mark.parametrize(
    ("observed", "expected"), [(6.0, 0.05), (6.6, 0.05 * 1.01), (60.0, 0.05 * 1.02), (0.0, 0.05 * 0.98)]
)
def test_an_adaptive_coefficient_follows_the_divergence(observed: float, expected: float) -> None:
    """Relative error clipped to 0.2, times 100 responses over a horizon of 1000."""
    spec = AdvantageSpec(kl=AdaptiveKl(target=6.0, horizon=1000))
    assert coefficient_after(spec, 0.05, {"kl/reference": observed}, 100) == pytest.approx(expected, rel=1e-9)


def test_an_adaptive_coefficient_waits_for_the_policy() -> None:
    """As long as the critic alone is trained, the KL is 0 and says nothing of the coefficient."""
    spec = AdvantageSpec(kl=AdaptiveKl(target=6.0, horizon=1000))
    assert coefficient_after(spec, 0.05, {"kl/reference": 0.0}, 100, trains_policy=False) == 0.05


def test_what_is_cut_and_left_out_is_not_trained_on() -> None:
    mask = AdvantageSpec(truncated="mask")
    cut = [replace(row, finish_reason="length") for row in ROLLOUTS]
    scored = [row.score is not None for row in SCORES]
    assert trained_on(cut, SCORES, AdvantageSpec()).tolist() == scored
    first = scored[0] and ROLLOUTS[0].finished
    assert trained_on(ROLLOUTS[:1] + cut[1:], SCORES, mask).tolist() == [first, False, False]


def test_a_fixed_coefficient_stays() -> None:
    assert coefficient_after(AdvantageSpec(), 0.3, {"kl/reference": 60.0}, 100) == 0.3
