"""RLOO: REINFORCE whose baseline for a response is what the other responses to the same prompt got. No critic.

    R(x, y_i) = score(x, y_i) - kl_coef * sum_t KL_t                         the whole response is one action
    A_i       = R(x, y_i) - 1/(k - 1) sum_{j != i} R(x, y_j)                 k responses to one prompt x
    gradient  = -mean_i A_i sum_t grad log policy(y_it)

Every token of a response has its response's advantage. The loss is PPO's surrogate (`surrogate.py`), whose gradient at
the first step of an iteration is the one above times a constant: the mean is over tokens (sums over responses, one
divisor for all), as everywhere here. At later steps the ratio corrects for the responses being those of the old policy,
and its clip bounds them; update.num_ppo_epochs=1 with num_minibatches=1 has no such step.

Source: Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740), the section "REINFORCE Leave-One-Out", after Kool et
al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!". Nothing is whitened: a mean over all prompts would move
the 0 of a prompt whose responses got the same. advantages.whiten with whiten_centred=false only scales.
"""

from __future__ import annotations

import torch

from ppo_core.algorithms.algorithm import Algorithm, Batch, Estimate
from ppo_core.algorithms.groups import Groups
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.models.forward import Need
from ppo_core.spec import AdvantageSpec


@torch.no_grad()
def estimate(batch: Batch, _: AdvantageSpec) -> Estimate:
    """The same advantage at every token of a response that counts.

    A response whose prompt has no other one that counts (unscored, or cut and left out) has no baseline: it gets 0.
    """
    groups = Groups.of(batch)
    baselines = (groups.sum(groups.rewards) - groups.rewards) / (groups.sizes - 1).clamp(min=1)
    return groups.estimate(groups.rewards - baselines, batch.response_mask)


RLOO = Algorithm(
    predictions=Need(logprobs=True, reference_logprobs=True),
    estimate=estimate,
    objectives={"policy": CLIPPED_SURROGATE},
    whitens=False,
)
