"""KL estimators against exact expectations, and the controller against hand-computed steps."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_core import kl
from ppo_core.kl import kl_estimate, next_kl_coef

FORMULAS = {
    "k1": lambda r: -r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: math.exp(r) - 1 - r,
    "abs": lambda r: abs(r),
}
CONTROLLER = {"target": 6.0, "horizon": 100.0, "num_sequences": 10}


def test_docstring_examples() -> None:
    assert doctest.testmod(kl) == (0, 3)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_estimators_are_their_formulas(estimator: str) -> None:
    logprobs, reference = [[-1.0, -2.5], [-0.25, -3.0]], [[-2.0, -0.5], [-0.25, -4.5]]
    expected = [
        [FORMULAS[estimator](q - p) for p, q in zip(*rows, strict=True)]
        for rows in zip(logprobs, reference, strict=True)
    ]
    observed = kl_estimate(torch.tensor(logprobs), torch.tensor(reference), estimator=estimator)
    torch.testing.assert_close(observed, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "ratio", "value"), [("k1", -30.0, 30.0), ("k2", 10.0, 50.0), ("k3", 25.0, math.exp(25.0) - 26.0)]
)
def test_no_estimate_is_cut(estimator: str, ratio: float, value: float) -> None:
    """Others cut the log-ratio to 20, and estimates to 10."""
    assert kl_estimate(torch.tensor([[0.0]]), torch.tensor([[ratio]]), estimator=estimator).item() == pytest.approx(
        value, rel=1e-6
    )


def test_the_sign_is_that_of_policy_over_reference() -> None:
    # The policy is likelier than the reference by e at this token: k1 = +1; r = -1: k2 = 1/2, k3 = 1/e.
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    observed = [kl_estimate(logprobs, reference, estimator=name).item() for name in FORMULAS]
    assert observed == pytest.approx([1.0, 0.5, 1 / math.e, 1.0], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    # The exact expectation over a vocabulary of three under the policy is KL(policy, reference).
    policy, reference = [0.5, 0.25, 0.25], [0.125, 0.625, 0.25]
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    p, q = torch.tensor([policy], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    expectation = (p * kl_estimate(p.log(), q.log(), estimator=estimator)).sum().item()
    assert expectation == pytest.approx(divergence, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_the_gradient_of_k2_is_that_of_the_divergence(estimator: str) -> None:
    # For p = softmax(logits), dKL(p, q) / dlogits_i = p_i * (log p_i - log q_i - KL); under p, r**2 / 2 has that mean.
    p, q = [0.5, 0.25, 0.25], [0.125, 0.625, 0.25]
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    expected = [a * (math.log(a / b) - divergence) for a, b in zip(p, q, strict=True)]
    logits = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    estimates = kl_estimate(logits.log_softmax(-1), torch.tensor([q], dtype=torch.float64).log(), estimator=estimator)
    (torch.tensor([p]) * estimates).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_straight_through_estimate_has_the_value_of_its_own(estimator: str) -> None:
    logprobs, reference = torch.tensor([[-1.0, -2.5, -0.1]]), torch.tensor([[-2.0, -0.5, -0.1]])
    expected = [[FORMULAS[estimator](q - p) for p, q in ((-1.0, -2.0), (-2.5, -0.5), (-0.1, -0.1))]]
    observed = kl_estimate(logprobs, reference, estimator=f"{estimator}+")
    torch.testing.assert_close(observed, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@given(st.floats(-15, 15), st.floats(-15, 15))
@settings(max_examples=100, deadline=None)
def test_k2_k3_and_abs_are_never_negative(logprob: float, reference: float) -> None:
    for estimator in ("k2", "k3", "abs"):
        observed = kl_estimate(torch.tensor([[logprob]]), torch.tensor([[reference]]), estimator=estimator)
        assert observed.item() >= 0


def test_k3_keeps_its_digits_near_zero() -> None:
    # exp(r) - 1 - r = r**2 / 2 + r**3 / 6 + ... is 5.0016671e-7 at r = 1e-3, where float32's exp(r) - 1 errs by 1e-7.
    observed = kl_estimate(torch.tensor([[0.0]]), torch.tensor([[1e-3]]), estimator="k3").item()
    assert observed == pytest.approx(5.0016671e-7, abs=1e-10)


def test_an_unknown_estimator_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), estimator="k4")


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"reference_logprobs has shape \(1, 2\).*logprobs has shape \(1, 3\)"):
        kl_estimate(torch.zeros(1, 3), torch.zeros(1, 2), estimator="k1")


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),  # on target: unchanged
        (6.6, 0.101),  # error 0.1, times 10 / 100
        (5.4, 0.099),
        (60.0, 0.102),  # clipped at +0.2
        (0.0, 0.098),  # clipped at -0.2
        (-3.0, 0.098),
    ],
)
def test_the_controller_moves_by_the_clipped_relative_error(observed: float, expected: float) -> None:
    assert next_kl_coef(0.1, observed, **CONTROLLER) == pytest.approx(expected, rel=1e-12)


def test_no_sequences_change_nothing() -> None:
    assert next_kl_coef(0.1, 60.0, target=6.0, horizon=100.0, num_sequences=0) == 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0.0}, "target=0.0"),
        ({"target": math.nan}, "target=nan"),
        ({"horizon": 0.0}, "horizon=0.0"),
        ({"horizon": -1.0}, "horizon=-1.0"),
        ({"num_sequences": -1}, "num_sequences=-1"),
    ],
)
def test_impossible_controllers_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next_kl_coef(0.1, 6.0, **{**CONTROLLER, **change})


@pytest.mark.parametrize("observed", [math.nan, math.inf])
def test_a_divergence_that_is_not_finite_is_refused(observed: float) -> None:
    with pytest.raises(ValueError, match="observed_kl"):
        next_kl_coef(0.1, observed, **CONTROLLER)


def test_a_step_that_would_turn_the_sign_is_refused_with_the_horizon_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"horizon=100\.0 is too short for 500 sequences.*above 100"):
        next_kl_coef(0.1, 0.0, target=6.0, horizon=100.0, num_sequences=500)
