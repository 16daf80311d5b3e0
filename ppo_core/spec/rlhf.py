"""What a whole way from preferences to a promoted policy is: `RlhfSpec`, torch-free.

reward_model ─► the folder <reward_model>, which a reward of kind `model` in `run` reads; `run.model.critic` may name it
run.sft ──────► the folder <policy>, which `reward_model.model.path` may name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from ppo_core.spec.flow_spec import NamedSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.loading import load_spec
from ppo_core.spec.paths import model_path
from ppo_core.spec.reward.kinds import ModelRewardSpec, RegexSpec, RewardKind
from ppo_core.spec.reward_model import RewardModelSpec
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.section import Section
from ppo_core.spec.sections import ModelSpec

REWARD_MODEL, POLICY = "<reward_model>", "<policy>"
"""Written in place of a path: the folder that an earlier stage leaves."""
REGISTERED = "models:/"
PARTS = ("reward_model", "run")


def model_name(text: str) -> str:
    """A folder, a name of the hub, or models:/NAME/VERSION. Raises ValueError for an alias, which may move before a run
    goes on."""
    if not text.startswith(REGISTERED):
        return model_path(text)
    if not re.fullmatch(r"models:/[^/@]+/\d+", text):
        raise ValueError(
            f"{text!r} is not a version of a registered model: write models:/NAME/VERSION (an alias may point to "
            "another version by the time an interrupted run is resumed)"
        )
    return text


def policy_name(text: str) -> str:
    """The same without names of the hub, which have a place in `run.model`."""
    if is_hub_name(text):
        raise ValueError(
            f"{text!r} is a name on the Hugging Face Hub: write it into run.model.path, with run.sft: null and "
            "without run.model.config and tokenizer, and leave it out here"
        )
    return model_name(text)


def trained_name(text: str) -> str:
    """A registered version, or an iteration of a run. Raises ValueError for what may be another one later."""
    if text.startswith(REGISTERED):
        return model_name(text)
    if not re.fullmatch(r"[^@/:]+@\d+", text):
        raise ValueError(
            f"{text!r} is no policy that ppoflow has trained: write models:/NAME/VERSION, or RUN@ITERATION"
        )
    return text


class GivenSpec(Section):
    """Existing models: the stage that would make one is skipped, and its section is ignored."""

    reward_model: Annotated[str, AfterValidator(model_name)] | None = Field(
        None,
        description="Reward model to use instead of training one: a folder, its hf:// name, or models:/NAME/VERSION of "
        "one that ppoflow has registered",
    )
    policy: Annotated[str, AfterValidator(policy_name)] | None = Field(
        None,
        description="Policy to start PPO from, instead of `run.sft` and the path, config and tokenizer of `run.model`: "
        "a folder, or models:/NAME/VERSION",
    )
    trained_policy: Annotated[str, AfterValidator(trained_name)] | None = Field(
        None,
        description="Policy to evaluate and promote instead of training one; SFT and the reward model's training are "
        "skipped too: models:/NAME/VERSION; or, with promote: false, RUN@ITERATION",
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        idle = [name for name in ("reward_model", "policy") if vars(self)[name] is not None]
        if self.trained_policy is not None and idle:
            raise ValueError(
                f"{idle[0]} has no effect beside trained_policy={self.trained_policy}, which is trained already: leave "
                "one of them out"
            )
        return self


class RlhfSpec(NamedSpec):
    """The full pipeline, from preferences to a promoted policy. `RlhfSpec.from_yaml(path)` reads it."""

    name: str = Field(
        "rlhf",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$",
        description="Name of the run by default, and the default names in `run` and `reward_model` begin with it: "
        "letters, digits, dots, dashes and underscores",
    )
    given: GivenSpec = Field(GivenSpec(), description="Existing models to use instead of running a stage")
    reward_model: RewardModelSpec | None = Field(
        None, description="Spec of the reward model's training; in a spec file, `file: reward_model.yaml` includes one"
    )
    run: RunSpec = Field(
        description="Spec of SFT and PPO; in a spec file, `file: ppo.yaml` includes one. One of its rewards must be of "
        f"kind model, with the path {REWARD_MODEL}"
    )
    evaluate: bool = Field(True, description="Evaluate the best policy on the held-out prompts")
    promote: bool = Field(True, description="Promote the policy to champion if it passes the gates of `run.promotion`")
    folder: str = Field(".", description="Folder that relative paths start from; by default the spec file's own")

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Self:
        """See `NamedSpec.from_yaml`; the sections `reward_model` and `run` may each name a `file`."""
        return load_spec(cls, Path(path), overrides, PARTS)

    @model_validator(mode="before")
    @classmethod
    def _parts_have_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("name", cls.model_fields["name"].default)
        names = {"run": name, "reward_model": f"{name}-reward-model"}
        parts = {part: values[part] for part in PARTS if isinstance(values.get(part), dict)}
        return {**values, **{part: {"name": names[part], **section} for part, section in parts.items()}}

    @model_validator(mode="after")
    def _there_is_a_reward_model(self) -> Self:
        if self.given.trained_policy is not None:
            return self
        if self.reward_model is None and self.given.reward_model is None:
            raise ValueError(
                "there is no reward model: add the section reward_model, or name an existing one in "
                "given.reward_model; to train without one, use ppoflow train"
            )
        if REWARD_MODEL not in self.run.reward.folders:
            raise ValueError(
                f"no reward of the run uses the reward model: add {{kind: model, path: {REWARD_MODEL}}} to "
                "run.reward.sources"
            )
        return self

    @model_validator(mode="after")
    def _the_policy_is_there_in_time(self) -> Self:
        if self.learns_from_policy and self.run.sft is None and self.given.policy is None:
            raise ValueError(
                f"reward_model.model.path={POLICY} stands for the policy that PPO starts from, but neither run.sft nor "
                "given.policy is set: set one of the two, or name a model there"
            )
        return self

    @model_validator(mode="after")
    def _prompts_have_one_form(self) -> Self:
        trained = self.trained
        if trained is None:
            return self
        mine, theirs = trained.dataset, self.run.dataset
        forms = {"chat": (mine.chat, theirs.chat), "system_prompt": (mine.system_prompt, theirs.system_prompt)}
        for key, (learned, answered) in forms.items():
            if learned != answered:
                raise ValueError(
                    f"run.dataset.{key} is {answered!r}, but reward_model.dataset.{key} {learned!r}: the reward model "
                    "would read prompts in another form than it was trained on; set both alike"
                )
        return self

    @model_validator(mode="after")
    def _models_have_names_of_their_own(self) -> Self:
        trained = self.trained
        if trained is not None and trained.model_name == self.run.model_name:
            raise ValueError(
                f"policy and reward model would both be registered as {self.run.model_name}: give one of them "
                "another registry.model"
            )
        return self

    @model_validator(mode="after")
    def _there_is_something_to_evaluate_with(self) -> Self:
        given = self.given.trained_policy
        if given is not None:
            return self._has_something_to_do(given)
        if (self.evaluate or self.promote) and not self.run.dataset.evaluates:
            raise ValueError(
                "run.dataset has no held-out prompts to evaluate with: name some in run.dataset.evaluation, or set "
                "evaluate and promote to false"
            )
        return self

    def _has_something_to_do(self, given: str) -> Self:
        if not (self.evaluate or self.promote):
            raise ValueError(
                f"given.trained_policy={given} leaves nothing to do where evaluate and promote are false: set one of "
                "them, or leave it out"
            )
        if self.promote and not given.startswith(REGISTERED):
            raise ValueError(
                f"given.trained_policy={given} is no registered version, and only those are promoted: write "
                "models:/NAME/VERSION, or set promote to false"
            )
        return self

    @property
    def trained(self) -> RewardModelSpec | None:
        """The training of the reward model; None where one is given, or a policy that needs none."""
        return self.reward_model if self.given.reward_model is None and self.given.trained_policy is None else None

    @property
    def learns_from_policy(self) -> bool:
        """Whether the reward model starts from the policy that PPO starts from."""
        return self.trained is not None and self.trained.model.path == POLICY

    @property
    def stages(self) -> tuple[str, ...]:
        """What is done, in this order."""
        trains = self.given.trained_policy is None
        wanted = {
            "SFT": trains and self.run.sft is not None and self.given.policy is None,
            "reward model": self.trained is not None,
            "PPO": trains,
            "evaluation": self.evaluate,
            "promotion": self.promote,
        }
        return tuple(stage for stage, done in wanted.items() if done)

    def document(self) -> dict[str, Any]:
        """The run's identity as JSON: everything but folders."""
        folders: dict[str, Any] = {part: {"folder"} for part in PARTS}
        return self.model_dump(mode="json", exclude={"folder": True, **folders})

    def run_with(self, reward_model: str, policy: str | None) -> RunSpec:
        """The run that reads the reward model in this folder, and starts from the given policy in that one."""
        return self._started(reading(self._in_place(self.run), reward_model), policy)

    def run_before(self, policy: str | None, critic: str | None = None) -> RunSpec:
        """The run as long as there is no reward model: whether a response says anything takes its place, and for the
        critic the folder `critic`, if one is given."""
        return self._started(wired(self._in_place(self.run), _stand_in, critic=critic), policy)

    def reward_model_from(self, policy: str | ModelSpec) -> RewardModelSpec:
        """Its training, where the policy that it may start from lies in this folder, or is made like this."""
        assert self.trained is not None
        spec = self._in_place(self.trained)
        if not self.learns_from_policy:
            return spec
        start = {"path": policy} if isinstance(policy, str) else dict(policy)
        taken = {name: start[name] for name in ("path", "config", "tokenizer") if start.get(name) is not None}
        own = {"path": None, "dtype": spec.model.dtype, "tokenizer": spec.model.tokenizer}
        return spec.model_copy(update={"model": ModelSpec.model_validate({**own, **taken})})

    def _in_place(self, part: Any) -> Any:
        """The spec of a part with its own folder as it is from here."""
        return part.model_copy(update={"folder": str(Path(self.folder) / part.folder)})

    def _started(self, run: RunSpec, policy: str | None) -> RunSpec:
        if self.given.policy is None:
            return run
        model = run.model.model_copy(update={"path": policy, "config": None, "tokenizer": None})
        return run.model_copy(update={"model": model, "sft": None})


class SupervisedStart(RunSpec):
    """The spec of a run of which only the start is made: nothing is sampled."""

    @classmethod
    def of(cls, spec: RunSpec) -> Self:
        """The same settings."""
        return cls.model_validate(spec.model_dump(mode="json"))

    @property
    def roles(self) -> tuple[str, ...]:
        """Without the rollout engine."""
        return ("scoring", "training")


def wired(run: RunSpec, put: Callable[[ModelRewardSpec], RewardKind], *, critic: str | None) -> RunSpec:
    """The run with another reward for each that reads the reward model of this flow, and a critic that begins as that
    from the folder `critic`."""
    sources: Iterable[RewardKind] = (
        put(reward) if isinstance(reward, ModelRewardSpec) and reward.path == REWARD_MODEL else reward
        for reward in run.reward.sources
    )
    model = run.model.model_copy(update={"critic": critic}) if run.model.critic == REWARD_MODEL else run.model
    return run.model_copy(update={"model": model, "reward": run.reward.model_copy(update={"sources": tuple(sources)})})


def reading(run: RunSpec, place: str) -> RunSpec:
    """The run with the reward model of this flow from that folder, or of that name of the hub."""
    return wired(run, lambda reward: reward.model_copy(update={"path": place}), critic=place)


def _stand_in(reward: ModelRewardSpec) -> RegexSpec:
    return RegexSpec(pattern=r"\S", name=reward.component, weight=reward.weight)
