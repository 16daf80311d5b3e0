"""What the spec of every flow has, whatever it trains: a name, a seed, and how it is read, changed and written down."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from ppo_core.spec.hub import HubCommit
from ppo_core.spec.loading import load_spec, overridden
from ppo_core.spec.reward.kinds import FunctionRewardSpec, HttpRewardSpec, JudgeSpec, ModelRewardSpec
from ppo_core.spec.reward.rules import UnitTestsSpec
from ppo_core.spec.reward.section import RewardSpec
from ppo_core.spec.section import Section
from ppo_core.spec.sections import EnginesSpec, ModelSpec, RolloutSpec, RunModelSpec, TrainingSpec

COMMITS = "Commits that hf:// names were resolved to; filled in when the run starts"
LARGEST_TRIED, MOST_DIVISORS = 10**5, 8


class NamedSpec(Section):
    """A spec with a name: a subclass adds its sections, and `folder`, where relative paths start."""

    if TYPE_CHECKING:
        folder: str
    name: str = Field(
        "ppo",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the MLflow experiment, and of the run by default: letters, digits, dots, dashes and "
        "underscores",
    )

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Self:
        """Read a spec file; `overrides` are `section.key=value` texts, applied before anything is checked.

        Raises: SpecError (a ValueError), one line per problem.
        """
        return load_spec(cls, Path(path), overrides)

    def with_overrides(self, overrides: list[str]) -> Self:
        """This spec with `section.key=value` texts applied. Raises SpecError, one line per problem."""
        return overridden(self, overrides)

    def document(self) -> dict[str, Any]:
        """The run's identity as JSON: everything but `folder`."""
        return self.model_dump(mode="json", exclude={"folder"})


class FlowSpec(NamedSpec):
    """The spec of a flow that trains: each has the sections `model`, `training` and `engines`, and `hub_commits`."""

    if TYPE_CHECKING:  # each spec has them in its own order
        model: ModelSpec
        training: TrainingSpec
        engines: EnginesSpec
        hub_commits: tuple[HubCommit, ...]
    seed: int = Field(0, ge=0, lt=2**63, strict=True, description="All randomness of the run derives from this number")

    @property
    def roles(self) -> tuple[str, ...]:
        """The engines that the flow needs."""
        return ("scoring", "training", "rollout")

    @property
    def engines_overlap(self) -> bool:
        """Whether several engines work at the same time."""
        return False

    @property
    def data(self) -> tuple[str, ...]:
        """Files of rows that it reads, and import paths of functions that yield them."""
        return ()

    @property
    def code(self) -> tuple[str, ...]:
        """Import paths of the user's other functions."""
        return ()

    @property
    def critic(self) -> str | None:
        """Folder that the critic begins as; None: it begins as the policy, or there is none."""
        return self.model.critic if isinstance(self.model, RunModelSpec) else None

    @property
    def model_folders(self) -> tuple[str, ...]:
        """Folders of models that it reads besides `model.path`."""
        return ()

    @property
    def reward_models(self) -> tuple[ModelRewardSpec, ...]:
        """Sequence classifiers that score responses."""
        return ()


def check_master_weights(
    model: ModelSpec, training: TrainingSpec, rollout: RolloutSpec | None = None, *, written: bool
) -> None:
    """Raise ValueError where training in bfloat16 would keep no fp32 weights to add small steps to.

    In a spec that is `written` by a person also where products are to be in a precision that the weights have not.
    """
    if written and model.dtype == "bfloat16" and training.compute_dtype == "float32":
        raise ValueError(
            "training.compute_dtype=float32 with model.dtype=bfloat16, whose products are in bfloat16: set model.dtype "
            "to float32, or leave compute_dtype out"
        )
    if written and rollout is not None and model.dtype == "bfloat16" and rollout.dtype == "float32":
        raise ValueError(
            "rollout.dtype=float32 with model.dtype=bfloat16, whose weights are in bfloat16: set model.dtype to "
            "float32, or leave rollout.dtype out"
        )
    if model.dtype == "bfloat16" and training.zero_stage == 0:
        raise ValueError(
            "model.dtype=bfloat16 with training.zero_stage=0 keeps no fp32 master weights: set zero_stage to 1, "
            "or dtype to float32"
        )


def check_timeouts(reward: RewardSpec, engines: EnginesSpec, *, written: bool) -> None:
    """Raise ValueError where a reward may take longer for one sample than its engine may be silent.

    Functions only in a spec that is `written` by a person: a run's record may be older than this rule.
    """
    limit = engines.reward_timeout_s
    for one in reward.rewards:
        if isinstance(one, FunctionRewardSpec) and not written:
            continue
        if not isinstance(one, HttpRewardSpec | JudgeSpec | UnitTestsSpec | FunctionRewardSpec):
            continue
        if one.timeout_s is not None and one.timeout_s >= limit:
            raise ValueError(
                f"timeout_s={one.timeout_s:g} of the reward {one.component} is not below "
                f"engines.reward_timeout_s={limit:g}, after which the scoring engine is taken to be hung: "
                "lower the first, or raise the second"
            )


def check_left_alone(name: str, section: Section, keys: tuple[str, ...], why: str) -> None:
    """Raise ValueError where a section has another value than its default for a key that the flow would ignore."""
    for key in keys:
        value, default = vars(section)[key], type(section).model_fields[key].default
        if value != default:
            raise ValueError(f"{name}.{key}={value} {why}: leave it out")


def check_ranks_divide(training: TrainingSpec, batches: dict[str, int]) -> None:
    """Raise ValueError where one of the batches (sequences, by what people call it) cannot be shared by all ranks."""
    for what, batch in batches.items():
        if batch % training.num_ranks:
            raise ValueError(
                f"training.num_ranks={training.num_ranks} does not divide the {batch} sequences of {what} evenly: "
                f"choose one of {divisors_near(batch, training.num_ranks)}"
            )


def divisors_near(number: int, wanted: int) -> list[int]:
    """The divisors that come closest to what was asked for, at most eight, ascending.

    Of a number above 10**10 only those that are at most 10**5, or what is left when it is divided by one of these.

    >>> divisors_near(12, 5)
    [1, 2, 3, 4, 6, 12]
    >>> divisors_near(2**20, 1000)
    [8, 16, 32, 64, 128, 256, 512, 1024]
    """
    small = [d for d in range(1, min(math.isqrt(number), LARGEST_TRIED) + 1) if number % d == 0]
    closest = sorted({*small, *(number // d for d in small)}, key=lambda divisor: abs(divisor - wanted))
    return sorted(closest[:MOST_DIVISORS])


def check_offloading(engines: EnginesSpec, *, asked: bool, adapters: bool) -> None:
    """Raise ValueError for a reference off the GPU that each minibatch asks, or that is no model of its own."""
    if engines.offload_reference and asked:
        raise ValueError(
            "engines.offload_reference=true with update.kl_loss_estimator=full: each minibatch asks the reference "
            "then; set offload_reference to false, or take another estimator"
        )
    if engines.offload_reference and adapters:
        raise ValueError(
            "engines.offload_reference=true with model.lora: the reference is the policy without its adapters and "
            "takes no memory; set it to false"
        )
