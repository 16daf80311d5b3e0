"""The spec of each job of an engine: what a stage's cache key covers besides its inputs and the code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ppo_core.spec import (
    AdvantageSpec,
    AlgorithmSpec,
    CurriculumSpec,
    DatasetSpec,
    EnginesSpec,
    EvaluatedWeights,
    FixedReference,
    ModelSpec,
    PpoSpec,
    ReferenceSpec,
    RewardSpec,
    Section,
    SupervisedSpec,
    TrainingSpec,
    UpdateSpec,
)
from ppo_core.spec.reward.kinds import RewardKind

Sharing = Literal["turns", "same", "own"]
"""How engines have GPUs: they take turns, work on the same ones with all that they hold, or have their own."""


class TrainingJob(Section):
    """What every job says that needs a checkpoint with all that is trained."""

    model: ModelSpec
    algorithm: AlgorithmSpec = PpoSpec()
    training: TrainingSpec
    deterministic: bool = False


class FinetunePolicyJob(Section):
    """Train a model on examples (SFT). Inputs: dataset, tokenizer; model, where the spec names a folder."""

    seed: int
    model: ModelSpec
    sft: SupervisedSpec
    training: TrainingSpec
    deterministic: bool = False


class StartPolicyJob(Section):
    """Make checkpoint 0. Inputs: dataset, tokenizer; model, where the spec names a folder or one was fine-tuned;
    critic, the folder that it begins as, where that is not the policy.
    """

    seed: int
    model: ModelSpec
    algorithm: AlgorithmSpec = PpoSpec()
    ema: bool = False


class SamplingJob(Section):
    """What every job says that needs vLLM. By itself: start it before there is a policy, of a run that begins with
    `model`. Inputs: dataset, tokenizer; model, where the spec names a folder.

    `stop` are texts that end a response beside EOS.
    """

    max_response_tokens: int
    stop: tuple[str, ...] = ()
    model: ModelSpec
    kv_cache_gib: float
    tensor_parallel_size: int


class GenerateJob(SamplingJob):
    """Sample responses. Inputs: checkpoint, dataset.

    `stream` is the iteration, or a name such as `evaluation`: part of every request's seed. `position` is the data
    cursor: prompts drawn so far. `temperature` 0 is greedy. `stop_token_ids` end a response beside EOS and `stop`.
    `weights` is the checkpoint's folder of who answers. The columns have temperatures and limits of single prompts.
    """

    seed: int
    stream: int | str
    split: Literal["train", "eval"]
    position: int = Field(ge=0)
    num_prompts: int
    shuffle: bool
    samples_per_prompt: int
    stop_token_ids: tuple[int, ...] = ()
    temperature: float
    deterministic: bool = False
    weights: EvaluatedWeights = "policy"
    curriculum: CurriculumSpec | None = None
    temperature_column: str | None = None
    max_response_tokens_column: str | None = None


class GenerateShardJob(Section):
    """Sample the responses to a contiguous part of the prompts that `whole` draws. Inputs: checkpoint, dataset.

    The part is prompts `first` to `first + count`; its rows are those that the whole job would give.
    """

    whole: GenerateJob
    first: int = Field(ge=0)
    count: int = Field(ge=1)


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
    smallest of the `gpus`, where it is known, and `sharing` how engines share it; `learner` is what is trained there.
    `fixed` are keys of the spec that it could not have otherwise, `learned` the prompts that its reward model learns
    from, as `check_preferences` gives them. `new`: no run has begun by this spec yet.
    """

    dataset: PrepareDatasetJob
    learned: str = ""
    new: bool = False
    engines: EnginesSpec
    gpu: bool | None
    gpu_gib: float | None = None
    gpus: int = 1
    sharing: Sharing = "own"
    learner: TrainingJob | None = None
    fixed: tuple[str, ...] = ()


MAKE_ROOM = "make_room"
"""The job, without inputs, after which an engine holds as little as it can until its next one."""


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


class OptimizerSettings(Section):
    """AdamW as torch has it; the learning rate is set before every step."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float

    @classmethod
    def of(cls, spec: UpdateSpec) -> OptimizerSettings:
        """That of a spec's `update` section."""
        return cls(betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, max_grad_norm=spec.max_grad_norm)


class ComputeAdvantagesJob(TrainingJob):
    """Rollouts and scores to experience. Inputs: checkpoint, reference, rollouts, scores; and what `Replay` says.

    `carried` is what the job of the iteration before said under that name: numbers that go on over iterations.
    `iteration`, counted from the first that trains the policy, and `decay_iterations` are for a KL coefficient that has
    a schedule. Without `trains_policy` (the critic warms up) the KL is 0, and an adaptive coefficient stays.
    """

    temperature: float
    advantages: AdvantageSpec
    max_response_tokens: int
    # Nothing is trained here, but the checkpoint is loaded with its optimizer, and so stays loaded for the update.
    optimizer: OptimizerSettings
    kl_coef: float
    iteration: int = 0
    decay_iterations: int | None = None
    trains_policy: bool = True
    carried: dict[str, float] = Field({})


class UpdatePolicyJob(TrainingJob):
    """One update. Inputs: checkpoint, experience; and what `Replay` says.

    With `model.lora`, or a loss with the KL over the whole vocabulary, also reference, the run's checkpoint 0.

    `iteration` counts from 0, for the schedules and the order. `whitening` is what is done to the advantages of each
    minibatch; `max_response_tokens` is for losses over a fixed length. `rate_factor` multiplies every learning rate.
    After `max_skipped_steps` optimizer steps in a row without a finite loss and gradient the job fails. With `full` the
    result holds all that is trained; without, only the policy and how to replay. Neither of the two changes weights.
    """

    seed: int
    iteration: int
    update: UpdateSpec
    whitening: Literal["none", "centred", "scaled"] = "none"
    max_response_tokens: int | None = None
    temperature: float
    rate_factor: float = 1.0
    max_skipped_steps: int = 3
    full: bool = True
    reference: ReferenceSpec = FixedReference()


class Replay(Section):
    """One update that made a policy-only checkpoint out of the last full one: what `state.json` says of it.

    A full checkpoint holds all that is trained; a policy-only one the policy, and in `replay` how the rest is made
    again. With a policy-only `checkpoint` a job gets the inputs `base` (the last full one) and `replay_0`, `replay_1`,
    … (experiences, in order) besides: a cold engine needs them, and they enter no result. `experience` is a digest.
    """

    spec: UpdatePolicyJob
    experience: str
