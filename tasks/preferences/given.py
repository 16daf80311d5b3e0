"""Where the parts of `ppoflow rlhf` find each other's models: in folders of the run, or where the spec gives one."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts import ArtifactCorrupted, ArtifactError, ArtifactRef, open_store
from infra.artifacts.export import check_export, export_part, exported_from
from infra.backend import open_records
from infra.mlflow.registry import SOURCE_TAG, describe
from infra.runs.lease import Lease
from infra.settings import Settings
from ppo_core.records import InputError
from ppo_core.spec import RlhfSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.rlhf import REGISTERED, reading
from tasks.policies.policy import CHECKPOINT_TAG, REWARD_MODEL_TAG
from tasks.preferences.register_reward_model import export_reward_model
from tasks.preferences.stages import MODEL
from tasks.runs.kept import RLHF_REWARD_MODEL, with_own_commits
from tasks.runs.run_state import recorded_spec
from tasks.stages.holding import RLHF


@dataclass(frozen=True)
class Places:
    """The folders of the reward model and of the policy that PPO starts from, made or given; or the hub's name of the
    former."""

    reward_model: str
    policy: str


@dataclass(frozen=True)
class StoredModel:
    """A registered model in the store: a part of an artifact."""

    ref: ArtifactRef
    part: str


def places_of(spec: RlhfSpec, run: str) -> Places:
    """Where the models of a run lie, or will; what is registered gets a copy in the run's folder."""
    settings = Settings()

    def place(given: str | None, own: Path) -> str:
        if given is not None and is_hub_name(given):
            return given
        return str(own if given is None or given.startswith(REGISTERED) else (Path(spec.folder) / given).absolute())

    return Places(
        place(spec.given.reward_model, settings.reward_model_folder(run)),
        place(spec.given.policy, settings.start_policy_folder(run)),
    )


def places_now(spec: RlhfSpec, run: str) -> Places:
    """The same as long as nothing is copied: what is registered lies in the store. Raises RegistryError, InputError."""
    store, later = open_store(Settings().store_root), places_of(spec, run)

    def place(given: str | None, tag: str, then: str) -> str:
        if given is None or not given.startswith(REGISTERED):
            return then
        found = stored(given, tag)
        return str(store.fetch(found.ref) / found.part)

    return Places(
        place(spec.given.reward_model, REWARD_MODEL_TAG, later.reward_model),
        place(spec.given.policy, CHECKPOINT_TAG, later.policy),
    )


def with_commits_of_parts(spec: RlhfSpec, run: str) -> RlhfSpec:
    """The spec with the commits that its names of the hub had when the run began: every part reads the same files."""
    root = open_store(Settings().store_root).root
    given = spec.given.reward_model or ""
    reads = reading(spec.run, given) if is_hub_name(given) else spec.run
    training = with_own_commits(root, reads, run, RLHF, keep=True)
    model = spec.reward_model
    if model is not None:
        model = with_own_commits(root, model, run, RLHF_REWARD_MODEL, keep=True, known=training.hub_commits)
    return spec.model_copy(update={"run": training, "reward_model": model})


def fetch_given(spec: RlhfSpec, run: str) -> None:
    """Copy what is registered into the run's folder; undamaged copies stay."""
    store, later = open_store(Settings().store_root), places_of(spec, run)
    model, policy = spec.given.reward_model, spec.given.policy
    if model is not None and model.startswith(REGISTERED):
        export_reward_model(store, stored(model, REWARD_MODEL_TAG).ref, run, Path(later.reward_model))
    if policy is not None and policy.startswith(REGISTERED):
        found, target = stored(policy, CHECKPOINT_TAG), Path(later.policy)
        require_same_start(store.root, run, target, found.ref, policy)
        export_part(store.fetch(found.ref), store.manifest(found.ref), found.ref, found.part, target)


def require_same_start(root: str, run: str, target: Path, ref: ArtifactRef, name: str) -> None:
    """Raise InputError where training of this name has begun from another policy, of which `target` is the copy."""
    before, begun = exported_from(target), recorded_spec(open_records(root, run))
    if before is not None and before.digest != ref.digest and begun is not None and begun.model.path == str(target):
        raise InputError(
            f"run {run} has begun from the policy {before.digest[:12]}, and given.policy={name} is another one, "
            f"{ref.digest[:12]}: choose another --run name, or give the first one again"
        )


def start_is_there(run: str) -> bool:
    """Whether the policy that training began with lies, undamaged, in its folder: the store may have let it go."""
    settings = Settings()
    if recorded_spec(open_records(settings.store_root, run)) is None:
        return False
    with suppress(ArtifactCorrupted):
        return check_export(settings.start_policy_folder(run)) is not None
    return False


def pin_start(lease: Lease, run: str) -> None:
    """Keep the collector from the policy that training will begin with, and its inputs: no record names them yet."""
    settings = Settings()
    store, start = open_store(settings.store_root), exported_from(settings.start_policy_folder(run))
    waiting = [] if start is None else [start]
    while waiting:
        ref = waiting.pop()
        lease.pin(ref.kind, ref.key)
        with suppress(ArtifactError):
            store.find(ref.kind, ref.key)  # what a collector of S3 has marked by now lives again
            waiting += store.manifest(ref).inputs


def stored(name: str, tag: str) -> StoredModel:
    """What ppoflow has registered under this name, as its `tag` says. Raises InputError for what has no such tag."""
    version = describe(Settings().tracking_uri, name)
    if tag not in version.tags:
        what = "reward model" if tag == REWARD_MODEL_TAG else "policy"
        raise InputError(f"{name} is no {what} that ppoflow has registered (its tag {tag} is missing): give a folder")
    ref = ArtifactRef.model_validate(json.loads(version.tags[tag]))
    part = MODEL if tag == REWARD_MODEL_TAG else version.tags.get(SOURCE_TAG, "policy").rpartition("/")[2]
    return StoredModel(ref, part)
