"""What the tasks of flows that learn from preferences work with: a run's means, and the names of its stages' inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from infra.artifacts import open_store
from infra.runs.records import RunRecords
from infra.settings import Settings
from ppo_core.records import PreparePreferencesJob
from ppo_core.spec import DpoSpec, RewardModelSpec
from tasks.runs.kept import DPO_POLICIES, REWARD_MODELS, with_own_commits
from tasks.stages.context import RunContext
from tasks.stages.holding import DPO, REWARD_MODEL
from tasks.stages.hub_names import Spec


@dataclass(frozen=True)
class PreferenceContext(RunContext):
    """A run's means. `flow` is in the names of its lease and its pages, `makes` says what comes out, which
    is kept by the pages of the name `kept_by`."""

    flow: ClassVar[str]
    makes: ClassVar[str]
    kept_by: ClassVar[str]
    spec: RewardModelSpec | DpoSpec  # type: ignore[assignment]  # with what the stages that it runs read


@dataclass(frozen=True)
class RewardModelContext(PreferenceContext):
    """Of a run that trains a reward model."""

    spec: RewardModelSpec
    flow = REWARD_MODEL
    makes = "reward model"
    kept_by = REWARD_MODELS


@dataclass(frozen=True)
class DpoContext(PreferenceContext):
    """Of a run that trains a policy."""

    spec: DpoSpec
    flow = DPO
    makes = "policy"
    kept_by = DPO_POLICIES


def preferences_job(spec: RewardModelSpec | DpoSpec) -> PreparePreferencesJob:
    """The preferences, as what is trained reads them.

    A reward model reads prompt and response as one text; a policy prompts in the form of those that are answered, and
    responses as they are sampled.
    """
    data = spec.dataset
    return PreparePreferencesJob(
        dataset=spec.dataset.preferences if isinstance(spec, RewardModelSpec) else spec.preferences,
        model=spec.model,
        by_policy=isinstance(spec, DpoSpec),
        chat=data.chat,
        system_prompt=data.system_prompt,
    )


def with_commits_of(kind: type[PreferenceContext], run: str, spec: Spec, _: RunRecords) -> Spec:
    """The spec with the commits that its names of the hub had when the run began."""
    return with_own_commits(open_store(Settings().store_root).root, spec, run, kind.flow, keep=True)
