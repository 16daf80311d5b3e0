"""What crosses the seam to the engines: the rows of the tables, and the spec of each job. Torch-free.

A job's spec is exactly what the stage's cache key covers besides its inputs and the code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from ppo_core.spec import (
    AdvantageSpec,
    AlgorithmSpec,
    DatasetSpec,
    EnginesSpec,
    ModelSpec,
    PpoSpec,
    RewardSpec,
    Section,
    SupervisedSpec,
    TrainingSpec,
    UpdateSpec,
)


class InputError(ValueError):
    """The user's input cannot be used; trying again would not help."""


def needs_own_code(path: object) -> InputError:
    """The refusal of a model or tokenizer that transformers reads only with code from its folder."""
    return InputError(
        f"{path} can be read only with code that its files name (auto_map), and such code does not run here: use a "
        "model whose type transformers knows, or have the owner of this machine allow it for all runs, by "
        "PPOFLOW_TRUST_REMOTE_CODE=1 in ppoflow's environment on the machine itself; no spec can"
    )


LOSS_DIGITS = 4
NOTED_LOSS = "loss "


def loss_note(loss: float) -> str:
    """What the progress of a supervised start says of a step."""
    return f"{NOTED_LOSS}{loss:.{LOSS_DIGITS}f}"


def noted_loss(note: str) -> float | None:
    """The loss in such a note; None where it says something else."""
    return float(note.removeprefix(NOTED_LOSS)) if note.startswith(NOTED_LOSS) else None


class TokenSequence(NamedTuple):
    """One prompt with one response, as token ids; batches of them are ragged lists.

    >>> TokenSequence(prompt_ids=[5, 6], response_ids=[7, 8, 2])
    TokenSequence(prompt_ids=[5, 6], response_ids=[7, 8, 2])

    In a batch of this and ``([5], [9])`` everything per token is ``[B=2, R=3]`` with the response mask
    ``[[True, True, True], [True, False, False]]``.
    """

    prompt_ids: list[int]
    response_ids: list[int]


Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a dataset.

    >>> PromptRow("3f1c", "7+5=", [10, 20, 8], "2", {"level": 1}).reference_answer
    '2'

    `prompt` is text or a list of chat messages; `reference_answer` is any JSON value, just as the user's row has it, or
    None; `metadata` holds every other column of the row.
    """

    prompt_id: str
    prompt: str | Messages
    prompt_token_ids: list[int]
    reference_answer: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class RolloutRow:
    """One sampled response.

    >>> RolloutRow("3f1c", 0, [10, 20], [8, 2], "2", [-0.5, -0.1], "stop").finished
    True

    `response_token_ids` includes the EOS when `finish_reason` is "stop"; `sampler_logprobs` has one entry per response
    token, of the distribution that was really sampled; `response` is the text without special tokens at its end.
    """

    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    response: str
    sampler_logprobs: list[float]
    finish_reason: str

    @property
    def finished(self) -> bool:
        """Whether the policy ended the response by itself (EOS), not the length limit."""
        return self.finish_reason == "stop"


@dataclass(frozen=True)
class ScoreRow:
    """The score of one response: the weighted sum of its components, or None where it could not be scored.

    >>> ScoreRow("3f1c", 0, 1.1, {"correct": 1.0, "format": 0.1}, False, None).score
    1.1
    """

    prompt_id: str
    sample_index: int
    score: float | None
    components: dict[str, float | None]
    truncated: bool
    error: str | None


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
    """Make checkpoint 0. Inputs: dataset, tokenizer; model, where the spec names a folder or one was fine-tuned."""

    seed: int
    model: ModelSpec
    algorithm: AlgorithmSpec = PpoSpec()


class GenerateJob(Section):
    """Sample responses. Inputs: checkpoint, dataset.

    `stream` is the iteration, or a name such as `evaluation`: part of every request's seed. `position` is the data
    cursor: prompts drawn so far. `temperature` 0 is greedy.
    """

    seed: int
    stream: int | str
    split: Literal["train", "eval"]
    position: int = Field(ge=0)
    num_prompts: int
    shuffle: bool
    samples_per_prompt: int
    max_response_tokens: int
    temperature: float
    model: ModelSpec
    kv_cache_gib: float
    tensor_parallel_size: int
    deterministic: bool = False


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
    max_response_tokens: int
    num_eval_prompts: int
    reward: RewardSpec


class CheckRunJob(Section):
    """Check what `prepare_dataset` checks, and what the model asks of the engines; writes nothing. Inputs as there.

    `gpu`: whether the rollout engines have one; None where that is another machine's.
    """

    dataset: PrepareDatasetJob
    engines: EnginesSpec
    gpu: bool | None


class ScoreJob(Section):
    """Score rollouts. Inputs: sources, rollouts, dataset."""

    reward: RewardSpec
    answer_column: str
    split: Literal["train", "eval"]


class EvaluateJob(Section):
    """Score held-out rollouts. Inputs: sources, sampled, greedy, dataset."""

    reward: RewardSpec
    answer_column: str
    pass_score: float


class CompareJob(Section):
    """Compare two policies' evaluations, prompt by prompt. Inputs: candidate, champion, dataset.

    `metric` is the score, or `accuracy`: whether it reaches `pass_score`.
    """

    metric: Literal["score", "accuracy"]
    pass_score: float
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
    """Rollouts and scores to experience. Inputs: checkpoint, reference, rollouts, scores; and what `Replay` says."""

    temperature: float
    advantages: AdvantageSpec
    # Nothing is trained here, but the checkpoint is loaded with its optimizer, and so stays loaded for the update.
    optimizer: OptimizerSettings
    kl_coef: float


class UpdatePolicyJob(TrainingJob):
    """One update. Inputs: checkpoint, experience; and what `Replay` says.

    `iteration` counts from 0, for the schedules and the order. `rate_factor` multiplies every learning rate. After
    `max_skipped_steps` optimizer steps in a row without a finite loss and gradient the job fails. With `full` the
    result holds all that is trained; without, only the policy and how to replay. Neither of the two changes weights.
    """

    seed: int
    iteration: int
    update: UpdateSpec
    temperature: float
    rate_factor: float = 1.0
    max_skipped_steps: int = 3
    full: bool = True


class Replay(Section):
    """One update that made a thin checkpoint out of the last full one: what `state.json` says of it.

    A full checkpoint holds all that is trained; a thin one the policy, and in `replay` how the rest is made again. With
    a thin `checkpoint` a job gets the inputs `base` (the last full one) and `replay_0`, `replay_1`, … (experiences, in
    order) besides: a cold engine needs them, and they enter no result. `experience` is a digest.
    """

    spec: UpdatePolicyJob
    experience: str


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: the same text for the same value, everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def derive_seed(*parts: int | str) -> int:
    """A seed below 2**63 by hashing: neighbouring parts give unrelated seeds, the same parts the same seed.

    Hashing, not adding: vLLM numbers the samples of one request seed, seed + 1, ..., so added seeds would repeat.
    """
    return int.from_bytes(hashlib.sha256(canonical_json(list(parts)).encode()).digest()[:8], "big") >> 1
