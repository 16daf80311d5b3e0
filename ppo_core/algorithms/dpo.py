"""Direct preference optimisation (DPO): a policy learns from preferences, without samples and without a reward model.

Rafailov et al. 2023, arXiv:2305.18290. The policy that is the best for a reward r at the price beta of its divergence
from a reference tells that reward, but for a number Z that responses to one prompt share (equation 5):

    r(x, y) = beta log(policy(y | x) / reference(y | x)) + beta log Z(x)

So a reward model's loss (`preferences.py`) on these implicit rewards trains the policy itself. Of a pair, w the better
response and l the other (equation 7):

    loss = -log sigmoid(beta log(policy(w | x) / reference(w | x)) - beta log(policy(l | x) / reference(l | x)))

log policy(y | x) is the sum over the tokens of the response, EOS among them; length-normalised, their mean (Lambert et
al. 2024, arXiv:2411.15124). Rankings, margins (Amini et al. 2024, arXiv:2402.10571) and label smoothing are those of
the reward model's loss.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ppo_core.algorithms.preferences import Pairs, preference_loss

MEASURED = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


class DpoLoss(NamedTuple):
    """The loss, and the numbers of MEASURED in their order, without gradients: each a sum over rows, a scalar."""

    total: Tensor
    measured: list[Tensor]


def implicit_rewards(logprobs: Tensor, reference_logprobs: Tensor, beta: float) -> Tensor:
    """beta log(policy / reference) of each response `[N]`, from its logprob in nats under either."""
    return beta * (logprobs - reference_logprobs)


def dpo_loss(rewards: Tensor, margins: Tensor, pairs: Pairs, *, label_smoothing: float = 0.0) -> DpoLoss:
    """Summed over rows, each the mean over its pairs, of the loss above.

    `rewards` are the implicit ones `[N]` in fp32, `margins` a number for each row. A tie is no hit.
    """
    loss = preference_loss(rewards, margins, pairs, label_smoothing=label_smoothing)
    better, worse = rewards.detach()[pairs.better], rewards.detach()[pairs.worse]
    measured = (better, worse, better - worse, (better > worse).float())
    return DpoLoss(loss, [(pairs.weight * numbers).sum() for numbers in measured])
