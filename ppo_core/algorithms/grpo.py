"""GRPO: a response's advantage is how many standard deviations its score lies above the mean of its group. No critic.

    S_i = score(x, y_i)        P_i = kl_coef * sum_t KL_t        j over the k responses to one prompt x; std with k - 1
    A_i = (S_i - mean_j S_j) / (std_j S_j + 1e-4) - (P_i - mean_j P_j)
    A_i = (S_i - mean_j S_j) - (P_i - mean_j P_j)                   algorithm.scale=none

Every token of a response has its response's advantage. The loss is PPO's surrogate (`surrogate.py`).

Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1. Without the deviation: Liu et al. 2025, Dr. GRPO
(arXiv:2503.20783), section 3.1: the deviation weighs prompts that are very easy or very hard more than others.

Where this differs from the paper: its loss is a mean over responses of means over tokens, with a KL term beside it;
here the mean is over all tokens (as in DAPO, arXiv:2503.14476, equation 12). The price P of divergence (advantages.kl),
whose coefficient may be 0, has no place in the paper; it is not divided by the deviation: responses of equal scores
would differ by it alone, and learn nothing else. As there, nothing is whitened (see `rloo.py`).
"""

from __future__ import annotations

from functools import partial

import torch

from ppo_core.algorithms.algorithm import Algorithm, Batch, Estimate
from ppo_core.algorithms.groups import Groups
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.models.forward import Need
from ppo_core.spec import AdvantageSpec, GrpoSpec

SMALLEST_DEVIATION = 1e-4
"""TRL's; the paper divides by the deviation as it is."""


@torch.no_grad()
def estimate(batch: Batch, _: AdvantageSpec, *, scaled: bool) -> Estimate:
    """The same advantage at every token of a response that counts; 0 where its prompt has no other one."""
    groups = Groups.of(batch)
    deviations = groups.deviations()
    if not scaled:
        return groups.estimate(deviations, batch.response_mask)
    of_scores = deviations if batch.credits is None else Groups.of(batch._replace(rewards=batch.credits)).deviations()
    std = (groups.sum(of_scores.square()) / (groups.sizes - 1).clamp(min=1)).sqrt()
    price = of_scores - deviations
    return groups.estimate(of_scores / (std + SMALLEST_DEVIATION) - price, batch.response_mask)


def grpo(spec: GrpoSpec) -> Algorithm:
    """With or without the standard deviation."""
    return Algorithm(
        predictions=Need(logprobs=True, reference_logprobs=True),
        estimate=partial(estimate, scaled=spec.scale == "std"),
        objectives={"policy": CLIPPED_SURROGATE},
        whitens=False,
    )
