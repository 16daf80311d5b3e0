"""The spec of each job of the training engine: what a stage's cache key covers besides its inputs and the code.

Those of preferences are in files of their own.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ppo_core.spec import (
    AdvantageSpec,
    AlgorithmSpec,
    FixedReference,
    ModelSpec,
    PpoSpec,
    ReferenceSpec,
    Section,
    SupervisedSpec,
    TrainingSpec,
    UpdateSpec,
)

MAKE_ROOM = "make_room"
"""The job, without inputs, after which an engine holds as little as it can until its next one."""

FORGET = "forget"
"""The job, without inputs, after which the training engine holds no checkpoint: the next one loads what it is given."""


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
