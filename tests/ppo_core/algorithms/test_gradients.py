"""The gradient of every loss that an algorithm has, against differences of its values in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_core.algorithms.algorithm import Minibatch
from ppo_core.algorithms.registry import algorithm_of
from ppo_core.losses import entropy_from_logits
from ppo_core.models.forward import Outputs
from ppo_core.off_policy import importance
from ppo_core.spec import (
    AlgorithmSpec,
    GrpoSpec,
    KlPenaltyPpoSpec,
    PpoSharedSpec,
    PpoSpec,
    ReinforceSpec,
    RlooSpec,
    UpdateSpec,
    VapoSpec,
)

B, R, WORDS, NORMALIZER, STEP = 3, 5, 4, 7, 1e-6
Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits [B, R, WORDS] and values [B, R]."""
ALGORITHMS: list[AlgorithmSpec] = [
    PpoSpec(),
    VapoSpec(lm_coef=0.4),
    PpoSharedSpec(value_coef=0.3),
    KlPenaltyPpoSpec(coef=0.7),
    RlooSpec(),
    GrpoSpec(),
    ReinforceSpec(),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "two bounds and a dual clip": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5},
    "an entropy bonus": {"entropy_coef": 0.3},
    "clipped values": {"value_clip": 0.2},
    "KL in the loss, k2": {"kl_loss_coef": 0.5, "kl_loss_estimator": "k2"},
    "KL in the loss, k3": {"kl_loss_coef": 0.5, "kl_loss_estimator": "k3"},
}


def loss_of(algorithm: AlgorithmSpec, network: str, options: dict[str, Any], seed: int) -> Loss:
    """One network's loss on made-up tokens; old logprobs are so far from the new ones that clips bind at some."""
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, dtype=torch.float64)

    tokens = torch.randint(WORDS, (B, R, 1), generator=dice)
    mask = torch.rand(B, R, generator=dice) < 0.8
    mask[:, 0] = True
    old, sampled = -1 + 0.5 * normal(B, R), -1 + 0.5 * normal(B, R)
    minibatch = Minibatch(
        mask,
        old,
        advantages=normal(B, R),
        values=normal(B, R),
        returns=normal(B, R),
        reference_logprobs=-1 + 0.5 * normal(B, R),
        weights=torch.rand(B, R, generator=dice, dtype=torch.float64),
        importance=importance(old, sampled, mask, "token", cap=1.5),
        imitation=mask * torch.tensor([[0.3], [0.0], [0.1]], dtype=torch.float64),
        counted=NORMALIZER,
    )
    objective, spec = algorithm_of(algorithm).objectives[network], UpdateSpec(**options)

    def loss(logits: Tensor, values: Tensor) -> Tensor:
        logprobs = logits.log_softmax(-1).gather(-1, tokens)[..., 0]
        outputs = Outputs(logprobs=logprobs, entropy=entropy_from_logits(logits), values=values)
        return objective.loss(outputs, minibatch, spec, NORMALIZER).total

    return loss


def slopes(loss: Loss, values_of: Loss, seed: int) -> tuple[float, float, float]:
    """Along a random direction from a random point: the gradient's, that of differences, and what rounding explains."""
    dice = torch.Generator().manual_seed(seed + 1)
    shapes = (B, R, WORDS), (B, R)
    at = [torch.randn(shape, generator=dice, dtype=torch.float64, requires_grad=True) for shape in shapes]
    along = [torch.randn(shape, generator=dice, dtype=torch.float64) for shape in shapes]
    found = torch.autograd.grad(loss(*at), at, allow_unused=True)
    ours = sum(float((slope * one).sum()) for slope, one in zip(found, along, strict=True) if slope is not None)
    with torch.no_grad():
        ahead, behind = (
            values_of(*(x + sign * STEP * one for x, one in zip(at, along, strict=True))) for sign in (1, -1)
        )
    return ours, float(ahead - behind) / (2 * STEP), 1e-6 * (1 + abs(ours))


def objectives() -> list[tuple[AlgorithmSpec, str]]:
    """Each once, whichever algorithms share it."""
    found = {
        objective: (algorithm, network)
        for algorithm in ALGORITHMS
        for network, objective in algorithm_of(algorithm).objectives.items()
    }
    return list(found.values())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("algorithm", "network"), objectives(), ids=lambda part: getattr(part, "kind", part))
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_the_gradient_is_that_of_differences(algorithm: AlgorithmSpec, network: str, name: str, seed: int) -> None:
    """A step across a kink, as where a clip begins to bind, is too rare to meet: steps are of 1e-6."""
    loss = loss_of(algorithm, network, SETTINGS[name], seed)
    ours, theirs, rounding = slopes(loss, loss, seed)
    assert ours == pytest.approx(theirs, abs=rounding)


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_estimators_that_borrow_a_gradient_have_that_of_k2(estimator: str, seed: int) -> None:
    def with_estimator(name: str) -> Loss:
        return loss_of(PpoSpec(), "policy", {"kl_loss_coef": 0.5, "kl_loss_estimator": name}, seed)

    ours, theirs, rounding = slopes(with_estimator(estimator), with_estimator("k2"), seed)
    assert ours == pytest.approx(theirs, abs=rounding)


@pytest.mark.parametrize("name", ["two bounds and a dual clip", "an entropy bonus", "KL in the loss, k2"])
def test_differences_tell_another_gradient(name: str) -> None:
    """The settings matter at these points: without them the slope is another one."""
    loss, plain = (loss_of(PpoSpec(), "policy", options, seed=3) for options in (SETTINGS[name], {}))
    ours, theirs, rounding = slopes(loss, plain, seed=3)
    assert abs(ours - theirs) > 100 * rounding
