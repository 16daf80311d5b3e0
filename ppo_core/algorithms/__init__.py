"""What is trained, and on which loss: a file per algorithm, its paper and equations on top."""

from __future__ import annotations

from ppo_core.algorithms.algorithm import Algorithm
from ppo_core.algorithms.ppo import PPO
from ppo_core.spec import AlgorithmSpec

ALGORITHMS = {"ppo": PPO}


def algorithm_of(spec: AlgorithmSpec) -> Algorithm:
    """The algorithm that a spec names."""
    return ALGORITHMS[spec.kind]
