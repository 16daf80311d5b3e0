"""PPO with a price on leaving the old policy in place of the clip, and a price that adapts itself.

    policy:  -mean (rho A - coef KL(old policy, policy))        rho = policy / old policy, at each token
    after each update, with d = mean KL(old policy, policy):
        coef / 2 where d < target / 1.5        2 coef where d > 1.5 target

Advantages and critic are PPO's (`ppo.py`). The KL is that at the sampled tokens, rho - 1 - log rho, whose expectation
and gradient under the old policy are those of the KL. d is measured by one more forward pass over the iteration's
responses, of the policy that the update ended with; a response's tokens are what time steps are in the source.

Source: Schulman et al. 2017 (arXiv:1707.06347), section 4, equation 8; the clip is what its authors found better.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ppo_core.algorithms.algorithm import Algorithm, Loss, Minibatch
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.surrogate import policy_objective
from ppo_core.kl import next_penalty_coef
from ppo_core.losses import penalised_policy_loss
from ppo_core.metrics import Maximum
from ppo_core.spec import KlPenaltyPpoSpec, UpdateSpec


def kl_penalty_ppo(spec: KlPenaltyPpoSpec) -> Algorithm:
    """With the coefficient of one iteration."""

    def penalised(
        logprobs: Tensor, minibatch: Minibatch, _: UpdateSpec, weights: Tensor | None, normalizer: int
    ) -> Loss:
        total = penalised_policy_loss(
            logprobs,
            minibatch.old_logprobs,
            minibatch.advantages,
            minibatch.response_mask,
            coef=spec.coef,
            importance_weights=weights,
            normalizer=normalizer,
        )
        return Loss(total, {"penalty_coef": Maximum(spec.coef)})

    def carry(kl: float | None) -> dict[str, float]:
        if spec.target is None:
            return {}
        return {"coef": spec.coef if kl is None else next_penalty_coef(spec.coef, kl, target=spec.target)}

    return replace(PPO, objectives={**PPO.objectives, "policy": policy_objective(penalised)}, carry=carry)
