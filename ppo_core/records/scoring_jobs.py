"""The spec of each job of the scoring engine: what a stage's cache key covers besides its inputs and the code.

Those of preferences are in files of their own.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ppo_core.records.training_jobs import TrainingJob
from ppo_core.spec import DatasetSpec, EnginesSpec, ModelSpec, RewardSpec, Section
from ppo_core.spec.reward.kinds import RewardKind
from ppo_core.spec.sections import ComputeDtype

Sharing = Literal["turns", "same", "own"]
"""How engines have GPUs: they take turns, work on the same ones with all that they hold, or have their own."""


class PrepareDatasetJob(Section):
    """Read, check and tokenize. Inputs: sources, tokenizer; model, where the spec names a folder."""

    dataset: DatasetSpec
    model: ModelSpec
    sft_data: str | None
    sft_prompt_column: str = "prompt"
    sft_completion_column: str = "completion"
    max_response_tokens: int
    max_response_tokens_column: str | None = None
    temperature_column: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    num_eval_prompts: int
    reward: RewardSpec


class CheckRunJob(Section):
    """Check what `prepare_dataset` checks, and what the model asks of the engines; writes nothing. Inputs as there.

    `gpu`: whether the rollout engines have one; None where that is another machine's. `gpu_gib` is the memory of the
    smallest of the `gpus`, where it is known, and `sharing` how engines share it; `learner` is what is trained there,
    and `sampler_dtype` what responses are sampled in. `fixed` are keys of the spec that it could not have otherwise,
    `learned` the prompts that its reward model learns from, as `check_preferences` gives them. `new`: no run has begun
    by this spec yet. `samples`: whether the flow samples responses at all, which end at the texts `stop`.
    """

    dataset: PrepareDatasetJob
    samples: bool = True
    stop: tuple[str, ...] = ()
    learned: str = ""
    new: bool = False
    engines: EnginesSpec
    sampler_dtype: ComputeDtype = "float32"
    gpu: bool | None
    gpu_gib: float | None = None
    gpus: int = 1
    sharing: Sharing = "own"
    learner: TrainingJob | None = None
    fixed: tuple[str, ...] = ()


FILES_OF = "files of "
"""So begins the name of an input that is a reward model's folder; its digest is part of that of `sources`."""
WITH_SIGNAL = "score/prompts_with_signal"
"""The metric that says it."""


class ScoreJob(Section):
    """Score rollouts. Inputs: sources, rollouts, dataset, tokenizer.

    With `samples_per_prompt` it also says how many prompts have responses of different scores; without
    `truncated_count`, those cut at the length limit are not among them, and scores beyond `score_clip` are that.
    """

    reward: RewardSpec
    answer_column: str
    split: Literal["train", "eval"]
    samples_per_prompt: int | None = None
    truncated_count: bool = True
    score_clip: float | None = None


class FinishedResponse(Section):
    """What rewards need of a response that was sampled while others still are; the names are those of `RolloutRow`."""

    prompt_id: str
    sample_index: int
    response: str
    response_token_ids: tuple[int, ...]


class ScoreAheadJob(Section):
    """Have `rewards`, each of which scores a sample by itself, score responses, and remember what they say.

    Inputs: sources, dataset. The job that scores all rollouts then asks for the rest alone.
    """

    rewards: tuple[RewardKind, ...]
    answer_column: str
    split: Literal["train", "eval"]
    responses: tuple[FinishedResponse, ...]


class SelectJob(Section):
    """Choose `num_prompts` prompts of scored batches (`rollout.dynamic_sampling`).

    Inputs: rollouts_0, scores_0, rollouts_1, …; sources, the code that scored them. `truncated_count` and
    `score_clip`: see `ScoreJob`.
    """

    reward: RewardSpec
    answer_column: str
    num_batches: int = Field(ge=1)
    num_prompts: int
    samples_per_prompt: int
    truncated_count: bool = True
    score_clip: float | None = None


class EvaluateJob(Section):
    """Score held-out rollouts. Inputs: sources, sampled, greedy, dataset.

    `checkpoint` is the digest of the policy that gave them: of two that answer alike each has an evaluation of its own.
    """

    checkpoint: str
    reward: RewardSpec
    answer_column: str
    pass_score: float


class CompareJob(Section):
    """Compare two policies' evaluations, prompt by prompt. Inputs: candidate, champion, dataset.

    `metric` is the score, `accuracy` (whether it reaches `pass_score`), or a reward by its name. More pairs without
    one of both than `max_failed_fraction` are refused.
    """

    metric: str
    pass_score: float
    max_failed_fraction: float
    confidence: float
    resamples: int
