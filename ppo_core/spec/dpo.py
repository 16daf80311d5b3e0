"""What the training of a policy on preferences (DPO) is: `DpoSpec`, torch-free.

Data, model, start, reward and evaluation are the sections of a `RunSpec`, so that a run of PPO and one of DPO compare.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveFloat, ValidationInfo, model_validator

from ppo_core.spec.algorithms import RlooSpec
from ppo_core.spec.dataset import DatasetSpec
from ppo_core.spec.flow_spec import (
    COMMITS,
    FlowSpec,
    check_left_alone,
    check_master_weights,
    check_ranks_divide,
    check_timeouts,
)
from ppo_core.spec.hub import HubCommit
from ppo_core.spec.promotion import CHAMPION
from ppo_core.spec.reward.kinds import ModelRewardSpec
from ppo_core.spec.reward.section import RewardSpec
from ppo_core.spec.reward_model import DescentSpec, PreferencesSpec, RewardRegistrySpec, check_rows_stay_whole
from ppo_core.spec.section import LearningRate
from ppo_core.spec.sections import (
    EnginesSpec,
    EvaluationSpec,
    ModelSpec,
    RolloutSpec,
    SupervisedSpec,
    TrainingSpec,
)


class DpoFitSpec(DescentSpec):
    """The fit of the policy to the preferences, by the loss of DPO."""

    learning_rate: LearningRate = Field(
        1e-4, description="Peak learning rate of DPO, reached at the end of the warm-up"
    )
    beta: PositiveFloat = Field(
        0.1,
        description="Implicit rewards are beta * log(policy / start): the higher, the closer it stays to its start",
    )
    length_normalised: bool = Field(
        False,
        description="Average a response's logprobs over its tokens instead of summing; beta is then usually 2 to 10",
    )


class DpoSpec(FlowSpec):
    """One training of a policy on preferences. `DpoSpec.from_yaml(path)` reads it."""

    name: str = Field(
        "dpo",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$",
        description="Name of the MLflow experiment, and of the DPO run by default: letters, digits, dots, dashes and "
        "underscores",
    )
    preferences: PreferencesSpec = Field(description="Preference pairs to train on, and held-out ones")
    dataset: DatasetSpec = Field(description="Prompts as for a PPO run; only the held-out ones are used")
    model: ModelSpec = Field(description="Where the policy starts")
    sft: SupervisedSpec | None = Field(
        None, description="Supervised fine-tuning (SFT) before DPO; none: DPO starts from the model itself"
    )
    dpo: DpoFitSpec = Field(DpoFitSpec(), description="The fit to the preferences")
    rollout: RolloutSpec = Field(RolloutSpec(), description="How responses to held-out prompts are sampled")
    reward: RewardSpec = Field(description="How responses to held-out prompts are scored; not trained on")
    training: TrainingSpec = Field(TrainingSpec(), description="How the training engine runs")
    evaluation: EvaluationSpec = Field(EvaluationSpec(), description="Held-out prompts, before and after")
    engines: EnginesSpec = Field(EnginesSpec(), description="Where engines run, and how long they may be silent")
    registry: RewardRegistrySpec = Field(
        RewardRegistrySpec(), description="The MLflow model that the DPO policy is registered as"
    )
    hub_commits: tuple[HubCommit, ...] = Field((), description=COMMITS)
    folder: str = Field(".", description="Folder that relative paths start from; by default the spec file's own")

    @model_validator(mode="after")
    def _batches_divide(self, info: ValidationInfo) -> Self:
        batches = {"a batch (dpo.batch_size)": self.dpo.batch_size}
        if self.sft is not None:
            batches["an SFT batch"] = self.sft.batch_size
        check_ranks_divide(self.training, batches)
        check_master_weights(self.model, self.training, self.rollout, written=bool(info.context))
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        sampled = "applies to iterations that train on sampled responses, and DPO has none"
        batches = ("prompts_per_iteration", "samples_per_prompt", "dynamic_sampling")
        check_left_alone("rollout", self.rollout, batches, sampled)
        own = ("temperature_column", "max_response_tokens_column")
        check_left_alone("rollout", self.rollout, own, "applies to prompts to train on, but DPO trains on preferences")
        drawn = "sets the order of prompts to train on, but DPO trains on preferences"
        check_left_alone("dataset", self.dataset, ("curriculum", "shuffle"), drawn)
        if self.dataset.weights:
            raise ValueError(f"a weight of dataset.train {drawn}: leave them all out")
        check_left_alone("evaluation", self.evaluation, ("every", "weights"), sampled)
        held = "is of a reference that is held, and DPO asks its start once, before the fit"
        check_left_alone("engines", self.engines, ("offload_reference",), held)
        check_rows_stay_whole(self.training)
        return self

    @model_validator(mode="after")
    def _is_promoted_by_nobody(self) -> Self:
        if self.registry.alias == CHAMPION:
            raise ValueError(
                f"registry.alias={CHAMPION} is where `ppoflow promote` puts policies that passed its gates, and "
                "those of DPO have passed none: choose another alias (by default candidate)"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_waited_for(self, info: ValidationInfo) -> Self:
        check_timeouts(self.reward, self.engines, written=bool(info.context))
        return self

    def notes(self) -> list[str]:
        """What a person should know before the run starts."""
        said = self.evaluation.notes(self.dataset) + self.engines.notes()
        given = [key for key, value in self.rollout if value != RolloutSpec.model_fields[key].default]
        if given and not self.dataset.evaluates:
            named = ", ".join(f"rollout.{key}" for key in given)
            said.append(f"without held-out prompts nothing is sampled, so without effect: {named}")
        return said

    @property
    def roles(self) -> tuple[str, ...]:
        """Without held-out prompts nothing is sampled."""
        return ("scoring", "training", *(("rollout",) if self.dataset.evaluates else ()))

    @property
    def algorithm(self) -> RlooSpec:
        """What the start is made for: a policy alone, as that of an algorithm without a critic."""
        return RlooSpec()

    @property
    def averages(self) -> bool:
        """No moving average of the policy is kept."""
        return False

    @property
    def data(self) -> tuple[str, ...]:
        """All places that rows are read from."""
        prompts = (*self.dataset.paths, *((self.sft.data,) if self.sft else ()))
        return (*self.preferences.paths, *prompts)

    @property
    def code(self) -> tuple[str, ...]:
        """Reward functions."""
        return self.reward.code

    @property
    def model_folders(self) -> tuple[str, ...]:
        """Reward models."""
        return self.reward.folders

    @property
    def reward_models(self) -> tuple[ModelRewardSpec, ...]:
        """Reward models."""
        return self.reward.models

    @property
    def model_name(self) -> str:
        """Name in the MLflow model registry."""
        return self.registry.model or self.name
