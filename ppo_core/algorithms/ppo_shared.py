"""PPO with one network: a value head on the policy's last hidden states, and one loss for both.

    loss = clipped surrogate - c2 * mean entropy + c1 * 1/2 mean max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2)

c1 is `algorithm.value_coef`, c2 `update.entropy_coef`; one optimizer, one rate and one gradient norm.

Source: Schulman et al. 2017 (arXiv:1707.06347), equation 9; advantages and returns are those of `ppo.py`.
"""

from __future__ import annotations

from ppo_core.algorithms.algorithm import Algorithm, Loss, Minibatch, Objective
from ppo_core.algorithms.ppo import PPO, critic_loss
from ppo_core.algorithms.surrogate import CLIPPED_SURROGATE
from ppo_core.models.forward import Need, Outputs
from ppo_core.spec import PpoSharedSpec, UpdateSpec


def need(spec: UpdateSpec) -> Need:
    """What the policy's loss needs, and values."""
    return CLIPPED_SURROGATE.need(spec)._replace(values=True)


def ppo_shared(settings: PpoSharedSpec) -> Algorithm:
    """The algorithm with its weight of the value loss."""

    def loss(outputs: Outputs, minibatch: Minibatch, spec: UpdateSpec, normalizer: int) -> Loss:
        policy = CLIPPED_SURROGATE.loss(outputs, minibatch, spec, normalizer)
        values = critic_loss(outputs, minibatch, spec, normalizer)
        measured = {f"value_{name}": part for name, part in values.measured.items()}
        return Loss(policy.total + settings.value_coef * values.total, {**policy.measured, **measured})

    return Algorithm(PPO.predictions, PPO.estimate, {"policy": Objective(need, loss)}, value_head=True)
