"""How far the policy has moved from its reference: estimates per token, and the controller of their price.

With r = log reference - log policy at tokens sampled from the policy, E[-r] is KL(policy, reference).
Source of k1, k2, k3: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

LARGEST_RELATIVE_ERROR = 0.2
PENALTY_BOUNDS = (1e-6, 1e6)


def _gradient_of_k2(r: Tensor) -> Tensor:
    return r.square() / 2 - (r.square() / 2).detach()


_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "k1": torch.neg,
        "k2": lambda r: r.square() / 2,
        # expm1 keeps the digits that exp(r) - 1 loses where policy and reference nearly agree.
        "k3": lambda r: torch.expm1(r) - r,
        "abs": torch.abs,
        # Their value, with the gradient of k2: what is added is 0.
        "k1+": lambda r: -r.detach() + _gradient_of_k2(r),
        "k3+": lambda r: (torch.expm1(r) - r).detach() + _gradient_of_k2(r),
    }
)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Estimate, token by token, the KL divergence of the policy from its reference, in nats.

    With r = reference_logprobs - logprobs: k1 = -r (unbiased, may be negative), k2 = r**2 / 2 (biased, low variance),
    k3 = exp(r) - 1 - r (unbiased, never negative; inf in float32 from r = 89), abs = |r| (a distance, no estimate of
    the divergence). On the policy's own samples the expected gradient of k2 is that of the divergence; that of k1 is 0,
    and that of k3 the gradient of KL(reference, policy). k1+ and k3+ have the values of k1 and k3, the gradient of k2.
    Shapes: both inputs and the result alike, [B, R]. No mask: slots that do not count are the consumer's to mask.
    Raises ValueError for an unknown estimator or shapes that differ.

    >>> kl_estimate(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -1.0]]), estimator="k1").tolist()
    [[1.0, -1.0]]
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(f"estimator={estimator!r} is unknown: choose one of {', '.join(_ESTIMATORS)}")
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"reference_logprobs has shape {tuple(reference_logprobs.shape)}, but logprobs has shape "
            f"{tuple(logprobs.shape)}: compute both for the same [B, R] response tokens"
        )
    return _ESTIMATORS[estimator](reference_logprobs - logprobs)


def next_penalty_coef(coef: float, observed_kl: float, *, target: float) -> float:
    """The price of leaving the old policy after an update that left it by `observed_kl`; both in nats per token.

    Half of it where observed_kl < target / 1.5, twice where observed_kl > target * 1.5, else the same; kept within
    `PENALTY_BOUNDS`, which no healthy run meets.
    Raises ValueError for a target that is not positive and an observed_kl that is not finite.
    Source: Schulman et al. 2017 (arXiv:1707.06347), section 4.

    >>> [next_penalty_coef(1.0, kl, target=0.01) for kl in (0.006, 0.01, 0.016)]
    [0.5, 1.0, 2.0]
    """
    if not target > 0:
        raise ValueError(f"target={target} must be above 0: give the divergence to aim at, or keep the coefficient")
    if not math.isfinite(observed_kl):
        raise ValueError(f"observed_kl={observed_kl} must be finite: look for -inf or nan in the logprobs")
    factor = 0.5 if observed_kl < target / 1.5 else 2.0 if observed_kl > target * 1.5 else 1.0
    lowest, highest = PENALTY_BOUNDS
    return min(max(coef * factor, lowest), highest)


def next_kl_coef(kl_coef: float, observed_kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
    """The KL coefficient after `num_sequences` more sequences whose divergence was `observed_kl`.

    kl_coef * (1 + clip(observed_kl / target - 1, -0.2, 0.2) * num_sequences / horizon): the price of divergence rises
    while the policy is further from its reference than `target`, and falls while it is nearer. `observed_kl` and
    `target` share one unit, nats per sequence in the source; `horizon` counts sequences. Pure: the caller keeps the
    state.
    Raises ValueError for a target or horizon that is not positive, for a num_sequences below 0, for an observed_kl that
    is not finite, and where one step is so long (num_sequences >= 5 * horizon) that the coefficient would lose its
    sign.
    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2, with K_beta * batch = num_sequences / horizon.

    >>> next_kl_coef(0.5, 12.0, target=6.0, horizon=100.0, num_sequences=50)
    0.55
    """
    if not target > 0:
        raise ValueError(f"target={target} must be above 0: give the divergence to aim at, or keep kl_coef fixed")
    if not horizon > 0:
        raise ValueError(f"horizon={horizon} must be above 0: give the number of sequences over which to correct")
    if num_sequences < 0:
        raise ValueError(f"num_sequences={num_sequences} must not be below 0: count the sequences of the iteration")
    if not math.isfinite(observed_kl):
        raise ValueError(f"observed_kl={observed_kl} must be finite: look for -inf or nan in the logprobs")
    error = max(-LARGEST_RELATIVE_ERROR, min(LARGEST_RELATIVE_ERROR, observed_kl / target - 1))
    factor = 1 + error * num_sequences / horizon
    if factor <= 0:
        raise ValueError(
            f"horizon={horizon} is too short for {num_sequences} sequences a step: raise it above {num_sequences / 5:g}"
        )
    return kl_coef * factor
