"""REINFORCE with the reward to go, less the batch's mean; with centred whitening it is REINFORCE++. No critic.

    G_t = sum_{s >= t} gamma^(s - t) r_s            r_s: the price of divergence at s; at the last token the score too
    A_t = G_t - mean_i R_i                           over the responses i of the batch, R_i their undiscounted rewards
    A_t = G_t                                        algorithm.baseline=none

With centred whitening (the default) an iteration's advantages have mean 0 and variance 1, and the constant baseline
cancels: that is REINFORCE++. The loss is PPO's surrogate (`surrogate.py`), whose gradient at the first step of an
iteration is that of REINFORCE, -A * grad log policy.

Source: Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning"; Hu
2025, REINFORCE++ (arXiv:2501.03262), equations 4 to 6. The reward to go is GAE with lambda 1 and no critic.
"""

from __future__ import annotations

from functools import partial

import torch

from ppo_core.advantages import gae
from ppo_core.algorithms.algorithm import Algorithm, Batch, Estimate
from ppo_core.algorithms.groups import Groups
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.masking import zero_masked
from ppo_core.models.forward import Need
from ppo_core.spec import AdvantageSpec, ReinforceSpec


@torch.no_grad()
def estimate(batch: Batch, spec: AdvantageSpec, *, centred: bool) -> Estimate:
    """The reward to go at every token that counts, less the mean reward of the batch's responses."""
    mask = batch.response_mask
    to_go = gae(batch.rewards, torch.zeros_like(batch.rewards), mask, gamma=spec.gamma, gae_lambda=1.0).advantages
    groups = Groups.of(batch)
    baseline = float(groups.rewards.sum() / groups.counts.sum().clamp(min=1)) if centred else 0.0
    return Estimate(zero_masked(to_go - baseline, mask), None, {"advantage/baseline": baseline})


def reinforce(spec: ReinforceSpec) -> Algorithm:
    """With or without the baseline."""
    return Algorithm(
        predictions=Need(logprobs=True, reference_logprobs=True),
        estimate=partial(estimate, centred=spec.baseline == "batch_mean"),
        objectives={"policy": CLIPPED_SURROGATE},
    )
