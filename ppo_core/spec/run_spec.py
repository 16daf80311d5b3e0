"""What a training run is: `RunSpec`, torch-free. Its sections are in `sections`, reading in `loading`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, model_validator

from ppo_core.spec.advantages import AdaptiveKl, AdvantageSpec
from ppo_core.spec.algorithms import AlgorithmSpec, PpoSharedSpec, PpoSpec
from ppo_core.spec.dataset import DatasetSpec
from ppo_core.spec.flow_spec import (
    COMMITS,
    FlowSpec,
    check_master_weights,
    check_offloading,
    check_ranks_divide,
    check_timeouts,
    divisors_near,
)
from ppo_core.spec.hub import HubCommit
from ppo_core.spec.promotion import OF_THE_SCORE, PromotionSpec, RegistrySpec, unmeasured_kl
from ppo_core.spec.reward.kinds import ModelRewardSpec
from ppo_core.spec.reward.section import RewardSpec
from ppo_core.spec.safety import CheckpointSpec, GuardsSpec
from ppo_core.spec.sections import (
    EnginesSpec,
    EvaluationSpec,
    RolloutSpec,
    RunModelSpec,
    SupervisedSpec,
    TrainingSpec,
)
from ppo_core.spec.update import UpdateSpec


class RunSpec(FlowSpec):
    """One training run. `RunSpec.from_yaml(path)` reads it, with errors that name value, limit and remedy."""

    iterations: PositiveInt = Field(30, description="Number of iterations, each with rollouts, scores and an update")
    schedule: Literal["synchronous", "overlapped"] = Field(
        "synchronous",
        description="overlapped: sample the next responses while the policy is being updated, with the policy before "
        "that update; needs update.importance_correction",
    )
    dataset: DatasetSpec = Field(description="Prompts to train on and to evaluate on")
    model: RunModelSpec = Field(description="Where policy and critic start")
    sft: SupervisedSpec | None = Field(
        None, description="Supervised fine-tuning (SFT) before PPO; none: PPO starts from the model itself"
    )
    algorithm: AlgorithmSpec = Field(
        PpoSpec(),
        description="Algorithm that trains the policy: kind ppo, vapo, ppo_shared or kl_penalty_ppo; or rloo, grpo or "
        "reinforce, without a critic",
    )
    rollout: RolloutSpec = Field(RolloutSpec(), description="What the policy samples in one iteration")
    reward: RewardSpec = Field(description="How responses are scored")
    advantages: AdvantageSpec = Field(
        AdvantageSpec(), description="How scores become advantages: reward shaping, KL penalty, GAE"
    )
    update: UpdateSpec = Field(UpdateSpec(), description="How policy and critic are updated")
    training: TrainingSpec = Field(TrainingSpec(), description="How the training engine runs")
    evaluation: EvaluationSpec = Field(
        EvaluationSpec(), description="Evaluation on held-out prompts, sampled and greedy"
    )
    checkpoint: CheckpointSpec = Field(
        CheckpointSpec(), description="What is checkpointed, and for how long it is kept"
    )
    guards: GuardsSpec = Field(GuardsSpec(), description="Which limits count as divergence, and what happens then")
    engines: EnginesSpec = Field(EnginesSpec(), description="Where engines run, and their limits of time and memory")
    registry: RegistrySpec = Field(RegistrySpec(), description="The MLflow model that the best policy is registered as")
    promotion: PromotionSpec = Field(PromotionSpec(), description="Gates that a policy must pass to become champion")
    hub_commits: tuple[HubCommit, ...] = Field((), description=COMMITS)
    folder: str = Field(
        ".",
        description="Folder that relative paths start from; by default the spec file's. Not part of the run's identity",
    )

    @property
    def retention(self) -> CheckpointSpec:
        """For how long checkpoints are kept: as `checkpoint` says, and not less than a rollback may return to."""
        last = self.checkpoint.keep_last
        if last is None:
            return self.checkpoint
        return self.checkpoint.model_copy(update={"keep_last": max(last, self.guards.goes_back + 1)})

    @model_validator(mode="after")
    def _batches_divide(self, info: ValidationInfo) -> Self:
        responses, minibatches = self.rollout.num_responses, self.update.num_minibatches
        if responses % minibatches:
            raise ValueError(
                f"update.num_minibatches={minibatches} does not divide the {responses} responses of an iteration "
                f"evenly (rollout.prompts_per_iteration x samples_per_prompt): choose one of "
                f"{divisors_near(responses, minibatches)}"
            )
        check_ranks_divide(self.training, self._trained_batches())
        check_master_weights(self.model, self.training, self.rollout, written=bool(info.context))
        return self

    @model_validator(mode="after")
    def _kl_steps_are_short(self) -> Self:
        responses, kl = self.rollout.num_responses, self.advantages.kl
        if isinstance(kl, AdaptiveKl) and responses >= 5 * kl.horizon:
            raise ValueError(
                f"advantages.kl.horizon={kl.horizon} is too short for the {responses} responses of an iteration: the "
                f"coefficient could turn negative in one step. Raise it to at least {responses // 5 + 1}"
            )
        return self

    @model_validator(mode="after")
    def _the_policy_is_trained(self) -> Self:
        warmup, decay = self.update.critic_warmup_iterations, self.update.decay_iterations or self.iterations
        last = min(decay, self.iterations)
        if warmup >= last:
            raise ValueError(
                f"update.critic_warmup_iterations={warmup} leaves no iteration to train the policy in (iterations="
                f"{self.iterations}, and its schedule ends after {decay}): lower it to {last - 1} or less"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit_into_microbatches(self) -> Self:
        tokens = self.training.microbatch_tokens
        longest = self.dataset.max_prompt_tokens + self.rollout.max_response_tokens
        if tokens is not None and tokens < longest:
            raise ValueError(
                f"training.microbatch_tokens={tokens} is less than the longest sequence: {longest} tokens "
                f"(dataset.max_prompt_tokens + rollout.max_response_tokens). Raise it to at least {longest}"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_waited_for(self, info: ValidationInfo) -> Self:
        check_timeouts(self.reward, self.engines, written=bool(info.context))
        return self

    @model_validator(mode="after")
    def _named_rewards_are_measured(self) -> Self:
        gold, metric = self.guards.gold_reward, self.promotion.metric
        names = [reward.component for reward in self.reward.rewards]
        for key, name, others in (("guards.gold_reward", gold, ()), ("promotion.metric", metric, OF_THE_SCORE)):
            if name is not None and name not in (*others, *names):
                raise ValueError(
                    f"{key}={name} is not {'' if not others else 'score, accuracy or '}one of the rewards "
                    f"({', '.join(names)}): name one of them, or add it to reward.sources with weight 0"
                )
        return self

    @model_validator(mode="after")
    def _older_samples_are_corrected(self) -> Self:
        if self.schedule == "overlapped" and self.update.importance_correction == "none":
            raise ValueError(
                "schedule=overlapped trains on responses that were sampled before the policy's last update, and "
                "update.importance_correction=none does not correct for that: set it to token, sequence or mask, or "
                "schedule to synchronous"
            )
        return self

    @model_validator(mode="after")
    def _ratios_are_corrected_once(self) -> Self:
        correction = self.update.importance_correction
        if self.advantages.old_logprobs == "sampler" and correction != "none":
            raise ValueError(
                f"update.importance_correction={correction} needs the trainer's own old logprobs, which "
                "advantages.old_logprobs=sampler does not compute: set old_logprobs to trainer, or "
                "importance_correction to none"
            )
        return self

    @model_validator(mode="after")
    def _overlapping_engines_take_no_turns(self) -> Self:
        if self.schedule == "overlapped" and self.engines.placement == "together":
            raise ValueError(
                "schedule=overlapped has rollout and training engines work at the same time, and "
                "engines.placement=together one after the other: set schedule to synchronous, or placement to apart"
            )
        return self

    @model_validator(mode="after")
    def _nothing_is_scored_ahead(self) -> Self:
        if self.schedule == "overlapped" and self.rollout.dynamic_sampling is not None:
            raise ValueError(
                "rollout.dynamic_sampling has to score a batch before it can decide to sample another, but with "
                "schedule=overlapped the scoring engine is busy then: set schedule to synchronous, or leave "
                "dynamic_sampling out"
            )
        return self

    @model_validator(mode="after")
    def _evaluated_weights_are_made(self) -> Self:
        if self.evaluation.weights == "ema" and self.update.ema_decay is None:
            raise ValueError(
                "evaluation.weights=ema needs a moving average, and update.ema_decay is off: set update.ema_decay (for "
                "example to 0.9), or evaluation.weights to policy"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_their_start_as_reference(self) -> Self:
        kind = self.advantages.reference.kind
        if self.model.lora is not None and kind != "fixed":
            raise ValueError(
                f"advantages.reference.kind={kind} with model.lora: the reference of a policy with adapters is always "
                "the model without them; set it to fixed, or leave model.lora out"
            )
        return self

    @model_validator(mode="after")
    def _the_update_reaches_the_reference(self) -> Self:
        check_offloading(self.engines, asked=self.update.exact_kl_loss, adapters=self.model.lora is not None)
        return self

    @model_validator(mode="after")
    def _no_adapters_below_a_value_head(self) -> Self:
        if self.model.lora is not None and isinstance(self.algorithm, PpoSharedSpec):
            raise ValueError(
                "model.lora with algorithm.kind=ppo_shared: adapters cannot be trained together with a value head on "
                "the policy; set algorithm.kind to ppo, rloo, grpo or reinforce, or leave model.lora out"
            )
        return self

    @model_validator(mode="after")
    def _sections_fit(self, info: ValidationInfo) -> Self:
        written = bool(info.context)
        problems = self.algorithm.problems(self.rollout, self.advantages, self.update, written=written)
        problems += self.update.problems(self.advantages, written=written)
        problems += self.model.problems(self.algorithm.kind, self.algorithm.MEANINGLESS)
        if self.advantages.overlong is not None:
            problems += self.advantages.overlong.problems(self.rollout)
        components = [reward.component for reward in self.reward.rewards]
        if written:
            gold = self.guards.gold_reward is not None
            problems += self.registry.problems(components, critic=self.algorithm.learns_values, gold=gold)
            problems += self.rollout.problems(self.dataset)
            unmeasured = unmeasured_kl(reference=self.advantages.reference.kind, evaluated=self.evaluation.weights)
            problems += self.promotion.problems(self.registry.alias, components, unmeasured=unmeasured)
            problems += self.guards.problems(
                clips="update.clip_high" not in self.algorithm.MEANINGLESS,
                moves=self.update.num_steps > 1 or self.advantages.old_logprobs == "sampler",
                compares_samplers=self.advantages.old_logprobs == "trainer",
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _trained_batches(self) -> dict[str, int]:
        batches = {"a minibatch": self.rollout.num_responses // self.update.num_minibatches}
        if self.sft is not None:
            batches["an SFT batch"] = self.sft.batch_size
        return batches

    @property
    def data(self) -> tuple[str, ...]:
        """All places that rows are read from: to train on, to evaluate with, to start from."""
        return (*self.dataset.paths, *((self.sft.data,) if self.sft else ()))

    def notes(self) -> list[str]:
        """What a person should know before the run starts: what it is too short for, among others."""
        said = self.update.notes(self.iterations, self.advantages) + self.algorithm.notes(self.update)
        said += self.advantages.notes(self.iterations, self.rollout.max_response_tokens, self.algorithm.ALPHA)
        said += self.guards.notes(
            self.iterations, gold_is_all=[one.component for one in self.reward.rewards] == [self.guards.gold_reward]
        )
        said += self.evaluation.notes(self.dataset) + self.engines.notes()
        said += self.registry.notes(evaluates=self.dataset.evaluates)
        if self.sft is not None and self.sft.warmup_steps > self.sft.num_steps:
            said.append(f"sft.warmup_steps={self.sft.warmup_steps} is cut to sft.num_steps={self.sft.num_steps}")
        return said

    @property
    def averages(self) -> bool:
        """Whether a moving average of the policy is kept beside it."""
        return self.update.ema_decay is not None

    @property
    def engines_overlap(self) -> bool:
        """Whether sampling goes on while the policy learns."""
        return self.schedule == "overlapped"

    @property
    def code(self) -> tuple[str, ...]:
        """Reward functions."""
        return self.reward.code

    @property
    def model_folders(self) -> tuple[str, ...]:
        """Reward models, and what the critic begins as."""
        return tuple(dict.fromkeys((*self.reward.folders, *filter(None, [self.critic]))))

    @property
    def reward_models(self) -> tuple[ModelRewardSpec, ...]:
        """Reward models."""
        return self.reward.models

    @property
    def model_name(self) -> str:
        """Name in the MLflow model registry."""
        return self.registry.model or self.name
