"""RLOO against its paper: advantages by a float64 loop and in closed form, the gradient of the loss in closed form."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.algorithms import groups, rloo, surrogate
from ppo_core.algorithms.algorithm import Batch, Minibatch
from ppo_core.algorithms.rloo import RLOO
from ppo_core.models.forward import Outputs
from ppo_core.records import RolloutRow, ScoreRow
from ppo_core.spec import AdvantageSpec, UpdateSpec
from ppo_core.training.experience import Predictions, build_experience

SPEC = AdvantageSpec(whiten=False)
# Prompt a has three responses (one could not be scored), b two, c one, d two of which one counts nowhere.
PROMPTS = ["a", "a", "a", "b", "b", "c", "d", "d", "a"]
COUNTED = [3, 2, 0, 1, 3, 2, 2, 0, 3]


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[t < count for t in range(4)] for count in COUNTED])
    mask[0, 1] = False  # a hole, as tokens of a tool's answer leave
    rewards = torch.randn(mask.shape, generator=generator)
    numbers = torch.tensor([sorted(set(PROMPTS)).index(name) for name in PROMPTS])
    return Batch(rewards, mask, torch.ones(len(PROMPTS), dtype=torch.bool), numbers)


def plain_advantages(given_: Batch) -> list[float]:
    """R(x, y_i) - 1/(k - 1) sum_{j != i} R(x, y_j), over the responses that count; 0 without another one."""
    rows = range(len(PROMPTS))
    rewards = [sum(float(given_.rewards[i, t]) for t in range(4) if given_.response_mask[i, t]) for i in rows]
    counts = [bool(given_.response_mask[i].any()) for i in rows]
    found = []
    for i in rows:
        others = [rewards[j] for j in rows if j != i and counts[j] and PROMPTS[j] == PROMPTS[i]]
        found.append(rewards[i] - sum(others) / len(others) if counts[i] and others else 0.0)
    return found


def assert_of_the_paper(estimate: Any, seed: int) -> None:
    given_ = batch(seed)
    advantages, returns, measured = estimate(given_, SPEC)
    expected = torch.tensor(plain_advantages(given_))[:, None].expand(-1, 4)
    torch.testing.assert_close(advantages, torch.where(given_.response_mask, expected, 0.0), rtol=0, atol=1e-6)
    assert returns is None
    assert measured == {"advantage/alone": pytest.approx(2 / 7)}


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_paper(seed: int) -> None:
    assert_of_the_paper(rloo.estimate, seed)


@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("groups.rewards - baselines", "groups.rewards + baselines"),
        ("- groups.rewards) / (groups.sizes - 1)", ") / groups.sizes"),
    ],
)
def test_a_wrong_baseline_is_noticed(original: str, replacement: str) -> None:
    with pytest.raises(AssertionError):
        assert_of_the_paper(mutated(rloo, original, replacement).estimate, 0)


def test_a_response_that_is_alone_in_its_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rloo, "Groups", mutated(groups, "self.sizes > 1", "self.sizes > 0").Groups)
    with pytest.raises(AssertionError):
        assert_of_the_paper(rloo.estimate, 0)


def mutated(module: ModuleType, original: str, replacement: str) -> Any:
    """`module` with one piece of its source exchanged."""
    source = Path(str(module.__file__)).read_text()
    if source.count(original) != 1:  # no AssertionError: that is what tests of mutants wait for
        raise LookupError(f"{original!r} is not in the source exactly once: adapt the mutation")
    mutant = ModuleType(f"mutated_{module.__name__}")
    sys.modules[mutant.__name__] = mutant
    exec(compile(source.replace(original, replacement), mutant.__name__, "exec"), vars(mutant))
    return mutant


@given(reward=st.floats(-100, 100, width=32), samples=st.integers(2, 9))
def test_responses_of_equal_reward_teach_exactly_nothing(reward: float, samples: int) -> None:
    mask = torch.ones((samples, 1), dtype=torch.bool)
    equal = Batch(torch.full((samples, 1), reward), mask, mask[:, 0], torch.zeros(samples, dtype=torch.long))
    assert rloo.estimate(equal, SPEC).advantages.tolist() == [[0.0]] * samples


def test_two_responses_get_their_difference() -> None:
    mask = torch.ones((2, 2), dtype=torch.bool)
    pair = Batch(torch.tensor([[1.0, 2.0], [0.5, 0.0]]), mask, mask[:, 0], torch.tensor([1, 1]))
    assert rloo.estimate(pair, SPEC).advantages.tolist() == [[2.5, 2.5], [-2.5, -2.5]]


def test_the_price_of_divergence_is_part_of_the_reward_that_is_compared() -> None:
    """Scores 1 and 0; k1 of (0.5 + 0.5) and (0.25 - 0.75) nats at 0.1: rewards 0.9 and 0.05, so advantages of 0.85."""
    rollouts = [RolloutRow("a", i, [3], [5, 1], "w5", [-1.0, -1.0], "stop") for i in range(2)]
    scores = [ScoreRow("a", i, score, {"f": score}, False, None) for i, score in enumerate((1.0, 0.0))]
    predictions = Predictions(torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-1.5, -1.5], [-1.25, -0.25]]))
    experience, metrics = build_experience(
        rollouts, scores, predictions, RLOO, SPEC, kl_coef=0.1, max_response_tokens=3
    )
    torch.testing.assert_close(experience.advantages, torch.tensor([[0.85, 0.85], [-0.85, -0.85]]), rtol=0, atol=1e-6)
    assert (experience.values, experience.returns) == (None, None)
    assert not [name for name in metrics if name.startswith("critic/")]


@pytest.mark.parametrize(
    ("truncated", "advantages"), [("terminal", [[-0.5], [1.0], [-0.5]]), ("mask", [[-1.0], [1.0], [0.0]])]
)
def test_a_response_cut_by_length_counts_or_is_left_out(truncated: str, advantages: list[list[float]]) -> None:
    """Scores 1, 2 and 1.5 - 0.5, the last one cut: left out, it is no baseline either."""
    rollouts = [RolloutRow("a", i, [3], [5], "w5", [-1.0], "length" if i == 2 else "stop") for i in range(3)]
    scores = [ScoreRow("a", i, score, {}, i == 2, None) for i, score in enumerate((1.0, 2.0, 1.5))]
    predictions = Predictions(torch.zeros((3, 1)), torch.zeros((3, 1)))
    penalty = {"missing_eos_penalty": 0.5} if truncated == "terminal" else {}
    spec = AdvantageSpec.model_validate({"whiten": False, "truncated": truncated, **penalty})
    experience, _ = build_experience(rollouts, scores, predictions, RLOO, spec, kl_coef=0.0, max_response_tokens=3)
    torch.testing.assert_close(experience.advantages, torch.tensor(advantages), rtol=0, atol=1e-6)
    assert bool(experience.response_mask[2, 0]) is (truncated == "terminal")


def assert_gradient_of_reinforce(loss: Any) -> None:
    """A policy that draws every token from softmax(theta): grad log softmax(theta)[y] = onehot(y) - softmax(theta)."""
    theta = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    tokens, mask = torch.tensor([[0, 2, 1], [1, 1, 0]]), torch.tensor([[True, True, True], [True, True, False]])
    advantages = torch.tensor([[0.7], [-0.4]]).expand(2, 3)
    logprobs = theta.log_softmax(0)[tokens]
    minibatch = Minibatch(mask, logprobs.detach(), advantages)
    outputs = Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    total = loss(outputs, minibatch, UpdateSpec(), int(mask.sum())).total
    expected, probabilities = torch.zeros(3, dtype=torch.float64), theta.detach().double().softmax(0)
    for row, column in mask.nonzero().tolist():
        onehot = torch.nn.functional.one_hot(tokens[row, column], 3)
        expected -= float(advantages[row, 0]) * (onehot - probabilities) / int(mask.sum())
    torch.testing.assert_close(torch.autograd.grad(total, theta)[0].double(), expected, rtol=0, atol=1e-7)


def test_the_gradient_of_the_first_step_is_that_of_reinforce() -> None:
    """-1/N sum_i A_i sum_t grad log policy."""
    assert_gradient_of_reinforce(RLOO.objectives["policy"].loss)


def test_a_loss_of_the_wrong_sign_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_gradient_of_reinforce(
            mutated(surrogate, "minibatch.advantages", "-minibatch.advantages").CLIPPED_SURROGATE.loss
        )
