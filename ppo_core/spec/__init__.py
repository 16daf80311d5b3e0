"""The spec of a run, torch-free: `RunSpec` and its sections. `RunSpec.from_yaml(path)` reads it."""

from ppo_core.spec.advantages import (
    AdaptiveKl,
    AdvantageSpec,
    AveragedReference,
    FixedKl,
    FixedReference,
    OverlongSpec,
    ReferenceSpec,
    SteppedReference,
)
from ppo_core.spec.algorithms import (
    AlgorithmSpec,
    GrpoSpec,
    KlPenaltyPpoSpec,
    PpoSharedSpec,
    PpoSpec,
    ReinforceSpec,
    RlooSpec,
    VapoSpec,
)
from ppo_core.spec.dataset import CurriculumSpec, DatasetSpec, SourceSpec
from ppo_core.spec.dpo import DpoFitSpec, DpoSpec
from ppo_core.spec.loading import SpecError, differing_keys, validated
from ppo_core.spec.lora import LoraSpec
from ppo_core.spec.promotion import PromotionSpec, RegistrySpec, registered_name
from ppo_core.spec.reward.section import RewardSpec
from ppo_core.spec.reward_model import DescentSpec, FitSpec, PreferencesSpec, RewardModelSpec
from ppo_core.spec.rlhf import GivenSpec, RlhfSpec
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.safety import CheckpointSpec, GuardsSpec
from ppo_core.spec.section import Section
from ppo_core.spec.sections import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    EnginesSpec,
    EvaluatedWeights,
    EvaluationSpec,
    ModelSpec,
    RolloutSpec,
    SupervisedSpec,
    TrainingSpec,
)
from ppo_core.spec.update import UpdateSpec

__all__ = [
    "HIGHEST_TEMPERATURE",
    "LOWEST_TEMPERATURE",
    "AdaptiveKl",
    "AdvantageSpec",
    "AlgorithmSpec",
    "AveragedReference",
    "CheckpointSpec",
    "CurriculumSpec",
    "DatasetSpec",
    "DescentSpec",
    "DpoFitSpec",
    "DpoSpec",
    "EnginesSpec",
    "EvaluatedWeights",
    "EvaluationSpec",
    "FitSpec",
    "FixedKl",
    "FixedReference",
    "GivenSpec",
    "GrpoSpec",
    "GuardsSpec",
    "KlPenaltyPpoSpec",
    "LoraSpec",
    "ModelSpec",
    "OverlongSpec",
    "PpoSharedSpec",
    "PpoSpec",
    "PreferencesSpec",
    "PromotionSpec",
    "ReferenceSpec",
    "RegistrySpec",
    "ReinforceSpec",
    "RewardModelSpec",
    "RewardSpec",
    "RlhfSpec",
    "RlooSpec",
    "RolloutSpec",
    "RunSpec",
    "Section",
    "SourceSpec",
    "SpecError",
    "SteppedReference",
    "SupervisedSpec",
    "TrainingSpec",
    "UpdateSpec",
    "VapoSpec",
    "differing_keys",
    "registered_name",
    "validated",
]
