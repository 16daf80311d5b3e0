"""PPO's clipped surrogate as the objective of a policy, whoever estimated the advantages.

    rho = policy / old policy, at each token
    loss = -mean w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - entropy_coef * mean entropy
           + kl_loss_coef * mean w KL

w is 1, or corrects for a sampler whose probabilities are others than the trainer's (`ppo_core.off_policy`).

KL is an estimate (`ppo_core.kl`) of the policy's to its reference at the sampled tokens. On the policy's own samples,
or weighed by w, the gradient of k2 is that of the KL in expectation, that of k3 is not; k1+ and k3+ have the gradient
of k2 too. Or it is the KL itself, summed over the vocabulary (update.kl_loss_estimator=full), then without w.

Source: Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9. While the policy is still the old one, rho is 1 and
the gradient is that of REINFORCE, -A * grad log policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from ppo_core.algorithms.algorithm import Loss, Minibatch, Objective
from ppo_core.kl import kl_estimate
from ppo_core.losses import policy_loss, weighted_mean
from ppo_core.masking import zero_masked
from ppo_core.metrics import Maximum, Mean, approximate_kl, clip_fraction, ratio_maximum
from ppo_core.models.forward import Need, Outputs
from ppo_core.spec import UpdateSpec

Surrogate = Callable[[Tensor, Minibatch, UpdateSpec, Tensor | None, int], Loss]
"""Of the policy's logprobs: its loss on the advantages, the tokens weighted, a sum over the last argument."""


def clipped(logprobs: Tensor, minibatch: Minibatch, spec: UpdateSpec, weights: Tensor | None, normalizer: int) -> Loss:
    """PPO's own."""
    tokens = logprobs, minibatch.old_logprobs, minibatch.advantages, minibatch.response_mask
    low, high, dual = spec.clip_low, spec.clip_high, spec.dual_clip
    total = policy_loss(
        *tokens, clip_low=low, clip_high=high, dual_clip=dual, importance_weights=weights, normalizer=normalizer
    )
    bound = clip_fraction(*tokens, clip_low=low, clip_high=high, dual_clip=dual)
    return Loss(total, {"clip_fraction": bound})


def need(spec: UpdateSpec) -> Need:
    """Logprobs and entropy, the latter with gradient only where it is part of the loss: that takes memory.

    The KL over the whole vocabulary only where it is: that takes a pass of the reference.
    """
    entropy: Literal["differentiable", "detached"] = "differentiable" if spec.entropy_coef else "detached"
    return Need(logprobs=True, entropy=entropy, kl=spec.exact_kl_loss)


def loss(outputs: Outputs, minibatch: Minibatch, spec: UpdateSpec, normalizer: int, *, of: Surrogate) -> Loss:
    """Means are weighted sums over the tokens that count, divided by `normalizer`; see `ppo_core.aggregation`."""
    logprobs, entropy, mask = outputs.logprobs, outputs.entropy, minibatch.response_mask
    assert logprobs is not None
    assert entropy is not None
    weights, importance = minibatch.weights, minibatch.importance
    if importance is not None:
        weights = importance.weights if weights is None else weights * importance.weights
    surrogate, measured_there = of(logprobs, minibatch, spec, weights, normalizer)
    bonus = weighted_mean(entropy, mask, weights=minibatch.weights, normalizer=normalizer)
    total, measured = surrogate - spec.entropy_coef * bonus, dict[str, Mean | Maximum]()
    if importance is not None:
        measured["importance_weight"] = Mean.over(importance.weights, mask)
        measured["importance_cut"] = Mean.over(importance.cut.float(), mask)
    if spec.kl_loss_coef:
        if spec.exact_kl_loss:
            kl, own = exact_kl(outputs, mask), minibatch.weights
        else:
            kl, own = estimated_kl(logprobs, minibatch, spec), weights
        total = total + spec.kl_loss_coef * weighted_mean(kl, mask, weights=own, normalizer=normalizer)
        measured["kl_loss"] = Mean.over(kl.detach(), mask)
    return Loss(
        total,
        {
            **measured_there,
            **measured,
            "loss": Mean(surrogate.detach().double() * normalizer, minibatch.counted),
            "entropy": Mean.over(entropy, mask),
            "approximate_kl": approximate_kl(logprobs, minibatch.old_logprobs, mask),
            "ratio_max": ratio_maximum(logprobs, minibatch.old_logprobs, mask),
        },
    )


def exact_kl(outputs: Outputs, mask: Tensor) -> Tensor:
    """KL(policy, reference) of each token's whole distribution [B, R]; `models/divergence.py` has the formula."""
    assert outputs.kl is not None
    return zero_masked(outputs.kl, mask)


def estimated_kl(logprobs: Tensor, minibatch: Minibatch, spec: UpdateSpec) -> Tensor:
    """An estimate of it at the sampled tokens, `[B, R]`."""
    assert minibatch.reference_logprobs is not None
    mask, reference_logprobs = minibatch.response_mask, minibatch.reference_logprobs
    return kl_estimate(
        zero_masked(logprobs, mask), zero_masked(reference_logprobs, mask), estimator=spec.kl_loss_estimator
    )


def policy_objective(surrogate: Surrogate) -> Objective:
    """A policy that learns from this surrogate, with an entropy bonus and a KL to the reference where asked for."""
    return Objective(need, partial(loss, of=surrogate))


CLIPPED_SURROGATE = policy_objective(clipped)
