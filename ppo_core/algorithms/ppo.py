"""PPO: a clipped surrogate for the policy, with advantages from a critic that is trained beside it.

    delta_t = r_t + gamma V_{t+1} - V_t       A_t = delta_t + gamma lambda A_{t+1}       R_t = A_t + V_t
    policy:  the clipped surrogate (`surrogate.py`)
    critic:  1/2 mean max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

The lambda of R may be another one than that of the advantages (advantages.critic_gae_lambda), and that of the
advantages one by the response's length (advantages.gae_lambda_alpha).

Source: Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9, the critic with weights and an optimizer of its own;
advantages: Schulman et al. 2016 (arXiv:1506.02438), equation 16; two lambdas: Yuan et al. 2025, VC-PPO
(arXiv:2503.01491), Decoupled-GAE; by length: Yue et al. 2025, VAPO (arXiv:2504.05118), section 4.2.
"""

from __future__ import annotations

from functools import partial

import torch

from ppo_core.advantages import gae, length_adaptive_lambda
from ppo_core.algorithms.algorithm import Algorithm, Batch, Estimate, Loss, Minibatch, Objective
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.losses import value_loss
from ppo_core.metrics import Maximum, Mean, explained_variance, value_clip_fraction
from ppo_core.models.forward import Need, Outputs
from ppo_core.spec import AdvantageSpec, UpdateSpec


def estimate(batch: Batch, spec: AdvantageSpec) -> Estimate:
    """GAE. A response cut by length may go on with the critic's value of what would have followed."""
    values, final_values, mask = batch.values, batch.final_values, batch.response_mask
    assert values is not None
    assert final_values is not None
    bootstrap = torch.where(batch.finished, 0.0, final_values) if spec.truncated == "bootstrap" else None
    by_length = spec.gae_lambda_alpha
    gae_lambda = spec.gae_lambda if by_length is None else length_adaptive_lambda(mask, alpha=by_length)
    estimate_with = partial(gae, batch.rewards, values, mask, gamma=spec.gamma, bootstrap_values=bootstrap)
    advantages, returns = estimate_with(gae_lambda=gae_lambda)
    if spec.critic_gae_lambda is not None:
        returns = estimate_with(gae_lambda=spec.critic_gae_lambda).returns
    return Estimate(advantages, returns, {"critic/explained_variance": explained_variance(values, returns, mask)})


def critic_loss(outputs: Outputs, minibatch: Minibatch, spec: UpdateSpec, normalizer: int) -> Loss:
    """Squared error to the returns, a weighted sum over `normalizer`."""
    values, old_values, returns, mask = outputs.values, minibatch.values, minibatch.returns, minibatch.response_mask
    assert values is not None
    assert old_values is not None
    assert returns is not None
    total = value_loss(
        values, old_values, returns, mask, clip=spec.value_clip, weights=minibatch.weights, normalizer=normalizer
    )
    measured: dict[str, Mean | Maximum] = {"loss": Mean(total.detach().double() * normalizer, minibatch.counted)}
    if spec.value_clip is not None:
        measured["clip_fraction"] = value_clip_fraction(values, old_values, returns, mask, clip=spec.value_clip)
    return Loss(total, measured)


PPO = Algorithm(
    predictions=Need(logprobs=True, reference_logprobs=True, values=True),
    estimate=estimate,
    objectives={"policy": CLIPPED_SURROGATE, "critic": Objective(lambda _: Need(values=True), critic_loss)},
)
