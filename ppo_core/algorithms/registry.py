"""The algorithms by the kind that a spec names."""

from __future__ import annotations

from ppo_core.algorithms.algorithm import Algorithm
from ppo_core.algorithms.ppo import PPO
from ppo_core.algorithms.rloo import RLOO
from ppo_core.spec import AlgorithmSpec

ALGORITHMS = {"ppo": PPO, "rloo": RLOO}


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that a spec names."""
    return ALGORITHMS[spec.kind]
