"""VAPO against its paper: both lambdas by loops, the language model's loss by a loop, and PPO as its limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.algorithms import vapo as module
from ppo_core.algorithms.algorithm import Batch, Loss, Minibatch
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.vapo import vapo
from ppo_core.models.forward import Outputs
from ppo_core.records import RolloutRow, ScoreRow
from ppo_core.spec import AdvantageSpec, UpdateSpec, VapoSpec
from ppo_core.training.experience import FILE, Experience, Predictions, build_experience
from tests.ppo_core.algorithms.test_rloo import mutated
from tests.ppo_core.test_losses import draw, loop_policy_loss, partitions, seeds

COEF = 0.7
LENGTHS = (30, 50, 1, 40)
CORRECT = [True, False, True, False, True, False]


def batch(seed: int) -> Batch:
    """Responses of different lengths, on both sides of 20 tokens, at which lambda begins to be more than 0."""
    dice = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[t < length for t in range(max(LENGTHS))] for length in LENGTHS])
    mask[1, 7] = False
    rewards, values = torch.randn((2, *mask.shape), generator=dice, dtype=torch.float64)
    scores = torch.tensor([1.0, 0.5, math.nan, 3.0])
    return Batch(rewards, mask, mask[:, 0], torch.arange(len(LENGTHS)), values, values[:, 0], scores)


def looped(given_: Batch, row: int, gae_lambda: float, gamma: float) -> dict[int, float]:
    """A_t = delta_t + gamma lambda A_{t+1} over the tokens that count, with nothing after the last."""
    assert given_.values is not None
    advantage = following = 0.0
    found = {}
    for t in reversed([t for t in range(given_.response_mask.shape[1]) if given_.response_mask[row, t]]):
        value = float(given_.values[row, t])
        advantage = float(given_.rewards[row, t]) + gamma * following - value + gamma * gae_lambda * advantage
        following, found[t] = value, advantage
    return found


def assert_of_the_paper(candidate: Any, settings: dict[str, Any], alpha: float, critic_lambda: float) -> None:
    given_ = batch(3)
    assert given_.values is not None
    found = candidate(VapoSpec()).estimate(given_, AdvantageSpec(gamma=0.9, **settings))
    for row in range(len(LENGTHS)):
        length = int(given_.response_mask[row].sum())
        policys = looped(given_, row, max(0.0, 1 - 1 / (alpha * length)), 0.9)
        critics = looped(given_, row, critic_lambda, 0.9)
        for t in policys:
            assert float(found.advantages[row, t]) == pytest.approx(policys[t], abs=1e-6)
            assert float(found.returns[row, t]) == pytest.approx(critics[t] + float(given_.values[row, t]), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "alpha", "critic_lambda"),
    [
        ({}, 0.05, 1.0),
        ({"gae_lambda_alpha": 0.2}, 0.2, 1.0),
        ({"critic_gae_lambda": 0.3}, 0.05, 0.3),
        ({"critic_gae_lambda": 0.0, "gae_lambda_alpha": 1.0}, 1.0, 0.0),
    ],
)
def test_lambdas_are_those_of_the_paper_unless_they_are_set(
    settings: dict[str, Any], alpha: float, critic_lambda: float
) -> None:
    assert_of_the_paper(vapo, settings, alpha, critic_lambda)


@pytest.mark.parametrize(
    ("original", "replacement"),
    [("CRITIC_LAMBDA = 1.0", "CRITIC_LAMBDA = 0.95"), ("[name] is None", "[name] != 0.3")],
)
def test_other_lambdas_are_noticed(original: str, replacement: str) -> None:
    with pytest.raises(AssertionError):
        assert_of_the_paper(mutated(module, original, replacement).vapo, {"gae_lambda_alpha": 0.2}, 0.2, 1.0)


def test_with_the_same_lambdas_the_estimate_is_ppos_and_says_what_is_correct() -> None:
    given_, spec = batch(5), AdvantageSpec(critic_gae_lambda=1.0, gae_lambda_alpha=0.05)
    algorithm = vapo(VapoSpec(correct_score=0.9))
    theirs, ours = PPO.estimate(given_, spec), algorithm.estimate(given_, AdvantageSpec())
    assert torch.equal(ours.advantages, theirs.advantages)
    assert ours.returns is not None
    assert theirs.returns is not None
    assert torch.equal(ours.returns, theirs.returns)
    assert ours.measured == {**theirs.measured, "advantage/correct": 0.5}
    assert algorithm.imitated is not None
    assert algorithm.imitated(given_).tolist() == [True, False, False, True]
    assert PPO.imitated is None


def test_correct_is_what_the_reward_says_whatever_is_done_to_its_scores(tmp_path: Path) -> None:
    """Scores 1, 3, none, 0.7, 1 of a response that was cut and left out; clipped to 0.5, normalised, charged."""
    scores = [1.0, 3.0, None, 0.7, 1.0]
    ended = ["stop"] * 4 + ["length"]
    rollouts = [RolloutRow(str(i), 0, [2], [3, 4], "w", [-1.0] * 2, end) for i, end in enumerate(ended)]
    told = [ScoreRow(str(i), 0, score, {}, False, None) for i, score in enumerate(scores)]
    predictions = Predictions(*(torch.full((5, 2), -1.0) for _ in range(3)), torch.zeros(5))
    settings = {"score_clip": 0.5, "score_norm": "std", "truncated": "mask", "overlong": {"buffer": 1}}
    spec = AdvantageSpec.model_validate(settings)

    def made(algorithm: Any) -> tuple[Experience, dict[str, float]]:
        return build_experience(rollouts, told, predictions, algorithm, spec, kl_coef=0.1, max_response_tokens=2)

    found, measured = made(vapo(VapoSpec()))
    assert found.imitated is not None
    assert found.imitated.tolist() == [True, True, False, False, False]
    assert measured["advantage/correct"] == pytest.approx(2 / 3)
    lower, _ = made(vapo(VapoSpec(correct_score=0.7)))
    assert lower.imitated is not None
    assert lower.imitated.tolist() == [True, True, False, True, False]
    found.save(tmp_path)
    read = Experience.load(tmp_path)
    assert read.imitated is not None
    assert torch.equal(read.imitated, found.imitated)
    made(PPO)[0].save(tmp_path)
    assert b"imitated" not in (tmp_path / FILE).read_bytes()


def minibatch(seed: int, rows: list[int], *, weighted: bool) -> tuple[Tensor, Minibatch]:
    """Logprobs, and some rows of a minibatch of six of which three are imitated; weights of the surrogate besides."""
    logprobs, old, advantages, weights, mask = draw(seed, batch=6)
    imitated = mask & torch.tensor(CORRECT)[:, None]
    given_ = Minibatch(
        mask[rows],
        old[rows],
        advantages[rows],
        weights=weights[rows] if weighted else None,
        imitation=(imitated / imitated.sum().clamp(min=1))[rows],
        counted=int(mask[rows].sum()),
    )
    return logprobs[rows], given_


def loss_of(candidate: Any, logprobs: Tensor, given_: Minibatch, normalizer: int, coef: float = COEF) -> Loss:
    outputs = Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    found: Loss = (
        candidate(VapoSpec(lm_coef=coef))
        .objectives["policy"]
        .loss(outputs, given_, UpdateSpec(clip_high=0.3), normalizer)
    )
    return found


def assert_loss_of_the_paper(candidate: Any, seed: int) -> None:
    """The clipped surrogate, and a mean over the correct responses' tokens whatever weights the surrogate has."""
    for weighted in (False, True):
        logprobs, given_ = minibatch(seed, list(range(6)), weighted=weighted)
        old, advantages, mask = given_.old_logprobs, given_.advantages, given_.response_mask
        surrogate = loop_policy_loss(
            logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.3, importance_weights=given_.weights
        )
        said = [float(logprobs[b, t]) for b, t in mask.nonzero().tolist() if CORRECT[b]]
        expected = -sum(said) / len(said)
        found = loss_of(candidate, logprobs, given_, int(mask.sum()))
        assert found.total.item() == pytest.approx(surrogate + COEF * expected, abs=1e-6)
        assert found.measured["lm_loss"].value == pytest.approx(expected, abs=1e-6)
        assert found.measured["loss"].value == pytest.approx(surrogate, abs=1e-6)


@given(seeds)
def test_the_loss_is_that_of_the_paper(seed: int) -> None:
    assert_loss_of_the_paper(vapo, seed)


@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("policy.total + settings", "policy.total - settings"),
        ("weighted_mean(-logprobs", "weighted_mean(logprobs"),
        ("weights=weights, normalizer=1", "normalizer=normalizer"),
        ("Mean.over(-logprobs, weights > 0)", "Mean.over(-logprobs, weights >= 0)"),
    ],
)
def test_a_wrong_loss_is_noticed(original: str, replacement: str) -> None:
    with pytest.raises(AssertionError):
        assert_loss_of_the_paper(mutated(module, original, replacement).vapo, 0)


@given(seeds, partitions(), st.booleans())
def test_the_cut_into_microbatches_changes_nothing(seed: int, parts: list[list[int]], weighted: bool) -> None:
    """A part with nothing to imitate too; the measured means add up to that of the whole."""
    normalizer = int(minibatch(seed, list(range(6)), weighted=weighted)[1].response_mask.sum())
    whole, *cut = (
        loss_of(vapo, *minibatch(seed, rows, weighted=weighted), normalizer) for rows in (list(range(6)), *parts)
    )
    torch.testing.assert_close(torch.stack([part.total for part in cut]).sum(), whole.total)
    said = [part.measured["lm_loss"] for part in cut]
    together = said[0]
    for part in said[1:]:
        together = together + part  # type: ignore[operator]
    assert together.value == pytest.approx(whole.measured["lm_loss"].value, rel=1e-9, abs=1e-12)


@given(seeds, st.booleans())
def test_without_its_weight_the_loss_and_its_gradient_are_ppos(seed: int, weighted: bool) -> None:
    found = []
    for objective in (vapo(VapoSpec(lm_coef=0.0)).objectives["policy"], PPO.objectives["policy"]):
        logprobs, given_ = minibatch(seed, list(range(6)), weighted=weighted)
        logprobs.requires_grad_()
        outputs = Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
        total = objective.loss(outputs, given_, UpdateSpec(), int(given_.response_mask.sum())).total
        total.backward()
        found.append((total.detach(), logprobs.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(*(gradient for _, gradient in found))


def test_where_nothing_is_correct_it_is_ppo_and_finite() -> None:
    logprobs, given_ = minibatch(0, list(range(6)), weighted=False)
    given_ = given_._replace(imitation=torch.zeros_like(logprobs))
    normalizer = int(given_.response_mask.sum())
    ours = loss_of(vapo, logprobs, given_, normalizer)
    assert torch.equal(ours.total, loss_of(vapo, logprobs, given_, normalizer, coef=0.0).total)
    assert ours.measured["lm_loss"].value == 0.0
