"""What crosses the seam to the engines: the rows of the tables, and the spec of each job. Torch-free."""

from ppo_core.records.digests import canonical_json, content_digest, derive_seed
from ppo_core.records.dpo_jobs import TrainDpoJob
from ppo_core.records.errors import NOT_IN_A_TRIAL, InputError, needs_own_code
from ppo_core.records.progress import LOSS_DIGITS, NOTED_LOSS, loss_note, noted_loss
from ppo_core.records.reward_model_jobs import (
    EvaluateRewardModelJob,
    PairSamplesJob,
    PreparePreferencesJob,
    TrainRewardModelJob,
)
from ppo_core.records.rollout_jobs import GenerateJob, GenerateShardJob, SamplingJob
from ppo_core.records.rows import Messages, PromptRow, RolloutRow, ScoreRow, TokenSequence
from ppo_core.records.scoring_jobs import (
    FILES_OF,
    WITH_SIGNAL,
    CheckRunJob,
    CompareJob,
    EvaluateJob,
    FinishedResponse,
    PrepareDatasetJob,
    ScoreAheadJob,
    ScoreJob,
    SelectJob,
    Sharing,
)
from ppo_core.records.training_jobs import (
    FORGET,
    MAKE_ROOM,
    ComputeAdvantagesJob,
    FinetunePolicyJob,
    OptimizerSettings,
    Replay,
    StartPolicyJob,
    TrainingJob,
    UpdatePolicyJob,
)

__all__ = [
    "FILES_OF",
    "FORGET",
    "LOSS_DIGITS",
    "MAKE_ROOM",
    "NOTED_LOSS",
    "NOT_IN_A_TRIAL",
    "WITH_SIGNAL",
    "CheckRunJob",
    "CompareJob",
    "ComputeAdvantagesJob",
    "EvaluateJob",
    "EvaluateRewardModelJob",
    "FinetunePolicyJob",
    "FinishedResponse",
    "GenerateJob",
    "GenerateShardJob",
    "InputError",
    "Messages",
    "OptimizerSettings",
    "PairSamplesJob",
    "PrepareDatasetJob",
    "PreparePreferencesJob",
    "PromptRow",
    "Replay",
    "RolloutRow",
    "SamplingJob",
    "ScoreAheadJob",
    "ScoreJob",
    "ScoreRow",
    "SelectJob",
    "Sharing",
    "StartPolicyJob",
    "TokenSequence",
    "TrainDpoJob",
    "TrainRewardModelJob",
    "TrainingJob",
    "UpdatePolicyJob",
    "canonical_json",
    "content_digest",
    "derive_seed",
    "loss_note",
    "needs_own_code",
    "noted_loss",
]
