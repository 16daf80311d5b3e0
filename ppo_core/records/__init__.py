"""What crosses the seam to the engines: the rows of the tables, and the spec of each job. Torch-free."""

from ppo_core.records.digests import canonical_json, content_digest, derive_seed
from ppo_core.records.dpo_jobs import TrainDpoJob
from ppo_core.records.errors import NOT_IN_A_TRIAL, InputError, needs_own_code
from ppo_core.records.jobs import (
    MAKE_ROOM,
    WITH_SIGNAL,
    CheckRunJob,
    CompareJob,
    ComputeAdvantagesJob,
    EvaluateJob,
    FinetunePolicyJob,
    GenerateJob,
    GenerateShardJob,
    OptimizerSettings,
    PrepareDatasetJob,
    Replay,
    SamplingJob,
    ScoreJob,
    SelectJob,
    StartPolicyJob,
    TrainingJob,
    UpdatePolicyJob,
)
from ppo_core.records.progress import LOSS_DIGITS, NOTED_LOSS, loss_note, noted_loss
from ppo_core.records.reward_model_jobs import EvaluateRewardModelJob, PreparePreferencesJob, TrainRewardModelJob
from ppo_core.records.rows import Messages, PromptRow, RolloutRow, ScoreRow, TokenSequence

__all__ = [
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
    "GenerateJob",
    "GenerateShardJob",
    "InputError",
    "Messages",
    "OptimizerSettings",
    "PrepareDatasetJob",
    "PreparePreferencesJob",
    "PromptRow",
    "Replay",
    "RolloutRow",
    "SamplingJob",
    "ScoreJob",
    "ScoreRow",
    "SelectJob",
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
