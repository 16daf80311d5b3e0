"""VAPO: PPO with two lambdas, and the correct responses as examples of a language model besides.

    policy:  the clipped surrogate + lm_coef * -1 / (sum_{o in T} |o|) sum_{o in T} sum_t log policy(o_t)
    critic:  PPO's (`ppo.py`)
    lambda of the policy: 1 - 1 / (0.05 tokens) of each response       lambda of the critic: 1

T are the minibatch's responses whose score, as the reward gave it, is at least `algorithm.correct_score`. The mean is
over their tokens in the whole minibatch, also where update.aggregation averages the surrogate in another way, and
without importance weights: it is imitation, not an estimate of the policy's own gradient. Where advantages.
gae_lambda_alpha or critic_gae_lambda are set, they take the place of 0.05 and 1.

The first of VAPO's changes to PPO, to train the critic alone before the policy moves, is the run's to set:
update.critic_warmup_iterations, 0 by default, as for PPO; without it a run says so.

Source: Yue et al. 2025, VAPO (arXiv:2504.05118), sections 4.1 (critic), 4.2 (lambda by length) and 4.3 (the language
model's loss); the two lambdas are those of Yuan et al. 2025, VC-PPO (arXiv:2503.01491).
"""

from __future__ import annotations

from torch import Tensor

from ppo_core.algorithms.algorithm import Algorithm, Batch, Estimate, Loss, Minibatch, Objective
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.losses import weighted_mean
from ppo_core.metrics import Mean
from ppo_core.models.forward import Outputs
from ppo_core.spec import AdvantageSpec, UpdateSpec, VapoSpec

CRITIC_LAMBDA = 1.0


def vapo(settings: VapoSpec) -> Algorithm:
    """With its settings of the language model's loss."""

    def estimate(batch: Batch, spec: AdvantageSpec) -> Estimate:
        own = {"gae_lambda_alpha": settings.ALPHA, "critic_gae_lambda": CRITIC_LAMBDA}
        found = PPO.estimate(
            batch, spec.model_copy(update={name: value for name, value in own.items() if vars(spec)[name] is None})
        )
        share = Mean.over(imitated(batch).float(), batch.response_mask.any(1)).value
        return found._replace(measured={**found.measured, "advantage/correct": share})

    def imitated(batch: Batch) -> Tensor:
        assert batch.scores is not None
        return batch.response_mask.any(1) & (batch.scores >= settings.correct_score)

    def loss(outputs: Outputs, minibatch: Minibatch, spec: UpdateSpec, normalizer: int) -> Loss:
        policy = CLIPPED_SURROGATE.loss(outputs, minibatch, spec, normalizer)
        logprobs, weights = outputs.logprobs, minibatch.imitation
        assert logprobs is not None
        assert weights is not None
        imitation = weighted_mean(-logprobs, minibatch.response_mask, weights=weights, normalizer=1)
        measured = {**policy.measured, "lm_loss": Mean.over(-logprobs, weights > 0)}
        return Loss(policy.total + settings.lm_coef * imitation, measured)

    objectives = {**PPO.objectives, "policy": Objective(CLIPPED_SURROGATE.need, loss)}
    return Algorithm(PPO.predictions, estimate, objectives, imitated=imitated)
