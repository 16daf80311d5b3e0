"""Which algorithm trains the policy: a section per algorithm. `ppo_core/algorithms/` has what each of them does."""

from ppo_core.spec.algorithms.registry import AlgorithmSpec
from ppo_core.spec.algorithms.with_values import KlPenaltyPpoSpec, PpoSharedSpec, PpoSpec, VapoSpec
from ppo_core.spec.algorithms.without_values import GrpoSpec, ReinforceSpec, RlooSpec

__all__ = [
    "AlgorithmSpec",
    "GrpoSpec",
    "KlPenaltyPpoSpec",
    "PpoSharedSpec",
    "PpoSpec",
    "ReinforceSpec",
    "RlooSpec",
    "VapoSpec",
]
