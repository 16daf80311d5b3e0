"""What the training of a reward model is: `RewardModelSpec`, torch-free."""

from __future__ import annotations

from itertools import combinations
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from ppo_core.spec.dataset import ErrorOrDrop, KeepOrDrop, SourcesSpec, Train
from ppo_core.spec.flow_spec import COMMITS, FlowSpec, check_left_alone, check_master_weights, check_ranks_divide
from ppo_core.spec.hub import HubCommit
from ppo_core.spec.paths import UserPath
from ppo_core.spec.promotion import RegisteredName, mlflow_alias
from ppo_core.spec.section import Beta, Fraction, LearningRate, NonNegative, Section, WeightDecay
from ppo_core.spec.sections import EnginesSpec, ModelSpec, TrainingSpec

OF_ROLLOUTS = (
    "rollout_resources",
    "kv_cache_gib",
    "rollout_engines",
    "tensor_parallel_size",
    "placement",
    "offload_reference",
)


class PreferencesSpec(SourcesSpec):
    """Which of several responses to a prompt is better: rows of files, or of Python functions."""

    train: Train = Field(
        description="A file of rows, or path/to/file.py:function, relative to the spec; columns `prompt`, `chosen`, "
        "`rejected` and optionally `margin`, or `prompt` and `responses`, best first; or hf://OWNER/NAME:FILE; or a "
        "list of several, each with `path` and `weight`"
    )
    evaluation: UserPath | None = Field(
        None, description="Held-out rows in the same form, of other prompts, for measuring accuracy"
    )
    evaluation_fraction: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="Instead of `evaluation`: hold out the rows of about this fraction of the prompts, by a hash of "
        "their text",
    )
    duplicates: KeepOrDrop = Field(
        "keep",
        description="drop: keep the first of rows with the same prompt and responses, and never train on a held-out "
        "prompt",
    )
    max_tokens: PositiveInt = Field(
        1024, description="Longer texts (prompt and response) are not truncated: see `too_long`"
    )
    too_long: ErrorOrDrop = Field(
        "error", description="Rows with a text of too many tokens: error refuses them, drop leaves them out"
    )
    prompt_column: str = Field("prompt", min_length=1, description="Column with the prompt: a text or messages")
    chosen_column: str = Field("chosen", min_length=1, description="Column with the better response of a pair")
    rejected_column: str = Field("rejected", min_length=1, description="Column with the other one")

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        for one, other in combinations(("prompt_column", "chosen_column", "rejected_column"), 2):
            if vars(self)[one] == vars(self)[other]:
                raise ValueError(f"{one} and {other} are both {vars(self)[one]!r}: give each its own column")
        return self

    def label_of(self, split: str) -> str:
        """What people know the rows of a split by."""
        if split == "train" or self.evaluation is not None:
            return self.label if split == "train" else str(self.evaluation)
        return f"{self.label} that evaluation_fraction={self.evaluation_fraction:g} holds out"

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        if self.evaluation is None and not self.evaluation_fraction:
            raise ValueError(
                "there are no held-out rows to measure accuracy on: name some in evaluation, or set "
                "evaluation_fraction, for example to 0.05"
            )
        if self.evaluation is not None and self.evaluation_fraction:
            raise ValueError(
                f"evaluation={self.evaluation} and evaluation_fraction={self.evaluation_fraction:g} both define the "
                "held-out rows: remove one of them"
            )
        if self.evaluation in [source.path for source in self.sources]:
            raise ValueError(
                f"train and evaluation are both {self.evaluation}: accuracy would be measured on what was learned; "
                "name other rows in one of them"
            )
        return self


class RewardDataSpec(PreferencesSpec):
    """Preferences for a reward model, which reads prompts in the form that those of PPO have."""

    chat: bool = Field(
        False,
        description="Text prompts go through the chat template too, each as one user message; as in a run's dataset",
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="First message of every prompt that has no system message of its own"
    )

    @property
    def preferences(self) -> PreferencesSpec:
        """The rows alone."""
        return PreferencesSpec.model_validate(self.model_dump(include=set(PreferencesSpec.model_fields)))


class DescentSpec(Section):
    """Optimizer steps on batches of preferences."""

    num_steps: PositiveInt = Field(400, description="Optimizer steps")
    batch_size: PositiveInt = Field(32, description="Rows (prompts with all their responses) per optimizer step")
    learning_rate: LearningRate = Field(5e-4, description="Peak rate, reached at the end of the warm-up")
    warmup_steps: int = Field(30, ge=0, description="Optimizer steps of linear warm-up, cut to num_steps")
    final_lr_fraction: Fraction = Field(0.1, description="Cosine decay ends at this fraction of learning_rate")
    weight_decay: WeightDecay = Field(0.01, description="Decoupled weight decay of AdamW")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="AdamW's decay rates of the two moments")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm")
    label_smoothing: float = Field(
        0.0, ge=0.0, lt=0.5, description="Fraction of the preferences assumed to be labelled the wrong way round"
    )


class FitSpec(DescentSpec):
    """How the reward model is fitted to the preferences."""

    centring: NonNegative = Field(
        0.0,
        description="Weight of (chosen + rejected score)**2 in the loss, which centres scores at 0; 0.01 in the source",
    )


class RewardRegistrySpec(Section):
    """The MLflow model that what was trained becomes a version of."""

    model: RegisteredName | None = Field(None, description="Name of the registered model; default: the spec's name")
    alias: str | None = Field("candidate", description="Alias that moves to the new version")

    @field_validator("alias")
    @classmethod
    def _known_to_mlflow(cls, alias: str | None) -> str | None:
        return None if alias is None else mlflow_alias(alias)


def check_rows_stay_whole(training: TrainingSpec) -> None:
    """Raise ValueError where a backward pass would have a number of responses, whatever rows they are of."""
    if training.microbatch_size is not None:
        raise ValueError(
            f"training.microbatch_size={training.microbatch_size} would separate responses that are compared with "
            "each other: set training.microbatch_tokens instead"
        )


class RewardModelSpec(FlowSpec):
    """One training of a reward model. `RewardModelSpec.from_yaml(path)` reads it."""

    name: str = Field(
        "reward-model",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$",
        description="Name of the MLflow experiment, and of the reward model's run by default: letters, digits, dots, "
        "dashes and underscores",
    )
    dataset: RewardDataSpec = Field(description="Preferences to train and to evaluate on")
    model: ModelSpec = Field(description="Causal LM to start from; it gets a new scalar head")
    fit: FitSpec = Field(FitSpec(), description="The fit to the preferences")
    training: TrainingSpec = Field(TrainingSpec(), description="How the training engine runs")
    engines: EnginesSpec = Field(EnginesSpec(), description="Where engines run, and how long they may be silent")
    registry: RewardRegistrySpec = Field(
        RewardRegistrySpec(), description="The MLflow model that the reward model is registered as"
    )
    hub_commits: tuple[HubCommit, ...] = Field((), description=COMMITS)
    folder: str = Field(".", description="Folder that relative paths start from; by default the spec file's own")

    @model_validator(mode="after")
    def _batches_divide(self, info: ValidationInfo) -> Self:
        check_ranks_divide(self.training, {"a batch (fit.batch_size)": self.fit.batch_size})
        check_master_weights(self.model, self.training, written=bool(info.context))
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        check_left_alone(
            "engines",
            self.engines,
            OF_ROLLOUTS,
            "configures the rollout engine, which the training of a reward model does not use",
        )
        if self.model.lora is not None:
            raise ValueError(
                "model.lora works with PPO and DPO only, and a reward model trains all weights: leave it out"
            )
        check_rows_stay_whole(self.training)
        return self

    def notes(self) -> list[str]:
        """What a person should know before the run starts."""
        return self.engines.notes()

    @property
    def roles(self) -> tuple[str, ...]:
        """Nothing is sampled."""
        return ("scoring", "training")

    @property
    def data(self) -> tuple[str, ...]:
        """The preferences."""
        return self.dataset.paths

    @property
    def model_name(self) -> str:
        """Name in the MLflow model registry."""
        return self.registry.model or self.name
