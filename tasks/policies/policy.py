"""Policies by the names that people give them: a registered version, or a run's checkpoint; and where each is from."""

from __future__ import annotations

import json
from dataclasses import dataclass

from infra.artifacts import ArtifactRef
from infra.mlflow.registry import RegistryError, Version, describe
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from tasks.runs.iteration_record import IterationRecord
from tasks.runs.run_state import committed, committed_at, read_spec, with_changes
from tasks.stages.references import CheckpointRef

REGISTERED = "models:/"
RUN_TAG, ITERATION_TAG, CHECKPOINT_TAG = "ppoflow.run", "ppoflow.iteration", "ppoflow.checkpoint"
REWARD_MODEL_TAG = "ppoflow.reward_model"
KL = "kl/reference"


@dataclass(frozen=True)
class Policy:
    """A policy, the run and iteration that made it, and the version it is registered as, if it is.

    `next` is the record of the iteration after it, which learned with it.
    """

    name: str
    run: str
    record: IterationRecord
    checkpoint: CheckpointRef
    spec: RunSpec
    next: IterationRecord | None = None
    version: Version | None = None

    @property
    def iteration(self) -> int:
        """The iteration that made it."""
        return self.record.iteration

    def divergence(self) -> tuple[float, str] | None:
        """KL to the reference per response as its run measured it, and on what; None where it did not.

        Of an average of policies nobody has measured it, nor to the start where the reference follows.
        """
        if self.spec.evaluation.weights != "policy" or self.spec.advantages.reference.kind != "fixed":
            return None
        if self.iteration == 0:
            return 0.0, "it is the reference"
        if self.next is not None and KL in self.next.metrics:
            whose = "its own responses" if self.record.sampler is None else "responses of the policy before it"
            return self.next.metrics[KL], f"on {whose}, in iteration {self.next.iteration}"
        if KL in self.record.metrics:
            return self.record.metrics[KL], f"in iteration {self.iteration}, on responses from before its last update"
        return None


def find_policy(name: str, folder: str | None = None) -> Policy:
    """The policy that `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `RUN` (its best) or `RUN@ITERATION` means.

    `folder`: where the sources of the run's spec are now, if they have moved. Raises InputError or RegistryError.
    """
    settings = Settings()
    if name.startswith(REGISTERED):
        return registered_policy(describe(settings.tracking_uri, name), name, folder)
    run, at, number = name.rpartition("@") if "@" in name else (name, "", "")
    if at and not number.isdecimal():
        raise InputError(
            f"{name!r} does not name a policy: write models:/NAME@ALIAS, models:/NAME/VERSION, RUN or RUN@ITERATION"
        )
    record = committed_at(run, int(number) if at else None)
    return policy_of(f"{run}@{record.iteration}", run, record, record.checkpoint, folder)


def registered_policy(version: Version, name: str, folder: str | None) -> Policy:
    """The policy behind a registered version. Raises InputError where ppoflow did not register it."""
    missing = [tag for tag in (RUN_TAG, ITERATION_TAG, CHECKPOINT_TAG) if tag not in version.tags]
    require_no_reward_model(version, name)
    if missing == [ITERATION_TAG]:
        raise InputError(
            f"{name} was made by `ppoflow dpo`, which has no iterations: it cannot be traced, evaluated or promoted; "
            f"`ppoflow sample {name}` asks it, and a spec of `ppoflow rlhf` takes it as given.policy"
        )
    if missing:
        raise InputError(
            f"{name} has no lineage (the tags {', '.join(missing)} are missing): only versions that ppoflow has "
            "registered can be traced, evaluated and promoted"
        )
    run, iteration = version.tags[RUN_TAG], int(version.tags[ITERATION_TAG])
    checkpoint = checkpoint_of(version, name)
    records = committed(run).records
    if iteration >= len(records):
        raise InputError(
            f"{name} is the policy of iteration {iteration} of run {run}, which was taken out of the run since (a "
            f"rollback, a rerun or damage) or is of another run of that name; it has 0..{len(records) - 1} now: it "
            f"cannot be traced, evaluated or promoted any more. `ppoflow sample {name}` asks it"
        )
    record = records[iteration]
    if record.checkpoint.digest != checkpoint.digest:
        raise InputError(
            f"{name} is not what iteration {iteration} of run {run} made (digest {checkpoint.digest[:12]} against "
            f"{record.checkpoint.digest[:12]}): the iteration was made again since, or this is another run of that name"
        )
    made = record.checkpoint.model_copy(update={"uri": checkpoint.uri})
    return policy_of(name, run, record, made, folder, version)


def checkpoint_of(version: Version, name: str) -> ArtifactRef:
    """Where the weights of a registered policy are stored. Raises InputError where ppoflow did not register it."""
    if CHECKPOINT_TAG not in version.tags:
        raise InputError(f"{name} has no tag {CHECKPOINT_TAG}: only versions that ppoflow has registered can be used")
    return ArtifactRef.model_validate(json.loads(version.tags[CHECKPOINT_TAG]))


def require_no_reward_model(version: Version, name: str) -> None:
    """Raise InputError where a registered version is not a policy, but what scores policies."""
    if REWARD_MODEL_TAG in version.tags:
        raise InputError(
            f"{name} is a reward model, made by `ppoflow reward-model`, not a policy: it cannot be sampled, traced, "
            "evaluated or promoted; a spec of `ppoflow rlhf` takes it as given.reward_model, other specs its exported "
            "folder as a reward of kind model"
        )


def policy_of(
    name: str,
    run: str,
    record: IterationRecord,
    checkpoint: CheckpointRef,
    folder: str | None,
    version: Version | None = None,
) -> Policy:
    """A policy with the spec that made it."""
    chain = committed(run)
    assert chain.spec is not None
    spec = with_changes(read_spec(chain.spec, run), record.changed)
    if folder is not None:
        spec = spec.model_copy(update={"folder": folder})
    following = next(iter(chain.records[record.iteration + 1 :]), None)
    return Policy(name, run, record, checkpoint, spec, following, version)


def registered(policy: Policy) -> Version:
    """The version that a policy is registered as. Raises RegistryError for one that is not."""
    if policy.version is None:
        raise no_version(policy.name)
    return policy.version


def no_version(name: str) -> RegistryError:
    """The refusal of a name that is not of a registered version."""
    return RegistryError(f"{name!r} is no registered version: write models:/NAME@ALIAS or models:/NAME/VERSION")


def require_registered(name: str, overrides: list[str], folder: str | None) -> None:
    """What `require_policy` refuses, and a name that is not of a registered version, whether or not it is of a run."""
    if not name.startswith(REGISTERED):
        raise no_version(name)
    require_policy(name, overrides, folder)


def require_policy(name: str, overrides: list[str], folder: str | None) -> Policy:
    """What `find_policy` finds; raises before anything is started, also for overrides that its spec refuses."""
    policy = find_policy(name, folder)
    policy.spec.with_overrides(overrides)
    return policy
