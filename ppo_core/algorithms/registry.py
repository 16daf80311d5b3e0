"""The algorithms by the kind that a spec names."""

from __future__ import annotations

from ppo_core.algorithms.algorithm import Algorithm
from ppo_core.algorithms.grpo import grpo
from ppo_core.algorithms.kl_penalty import kl_penalty_ppo
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.ppo_shared import ppo_shared
from ppo_core.algorithms.reinforce import reinforce
from ppo_core.algorithms.rloo import RLOO
from ppo_core.algorithms.vapo import vapo
from ppo_core.spec import (
    AlgorithmSpec,
    GrpoSpec,
    KlPenaltyPpoSpec,
    PpoSharedSpec,
    PpoSpec,
    ReinforceSpec,
    RlooSpec,
    VapoSpec,
)


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that a spec names, with its settings."""
    match spec:
        case PpoSpec():
            return PPO
        case KlPenaltyPpoSpec():
            return kl_penalty_ppo(spec)
        case PpoSharedSpec():
            return ppo_shared(spec)
        case VapoSpec():
            return vapo(spec)
        case RlooSpec():
            return RLOO
        case GrpoSpec():
            return grpo(spec)
        case ReinforceSpec():
            return reinforce(spec)
