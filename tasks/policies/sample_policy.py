"""Asking a policy by hand, through the same rollout engine that training uses."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.artifacts import ArtifactMissing, open_store
from infra.artifacts.export import check_export
from infra.engines.protocol import EngineInput, EngineJob
from infra.mlflow.registry import SOURCE_TAG, Version, describe
from infra.settings import Settings
from ppo_core.records import InputError
from tasks.policies.policy import CHECKPOINT_TAG, checkpoint_of, find_policy, require_no_reward_model
from tasks.runs.state_folder import require_writable_state
from tasks.stages.engine_programs import EnginePlan, launch
from tasks.stages.jobs import ask


def sample_policy(
    model: str, prompt: str, *, temperature: float, max_tokens: int, count: int, seed: int, chat: bool
) -> list[str]:
    """`count` answers. Raises InputError where `model` names no policy."""
    settings = Settings()
    require_writable_state(settings)
    policy = policy_folder(model, settings)
    engine = launch(EnginePlan("rollout", "sample"), settings, settings.home / "logs")
    document = {
        "prompt": prompt,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "count": count,
        "seed": seed,
        "chat": chat,
    }
    job = EngineJob("sample", {"policy": EngineInput(policy, str(policy))}, None, document)
    try:
        return list(ask(engine, job, silence_s=600.0).result["responses"])
    finally:
        engine.close()


def policy_folder(model: str, settings: Settings) -> Path:
    """The Hugging Face folder of a registered model, or of a run's policy, or a folder itself.

    A run's policy is what `find_policy` finds. A registered one need not be from a run: DPO made it, or somebody else.
    """
    if model.startswith("models:/"):
        version = describe(settings.tracking_uri, model)
        require_no_reward_model(version, model)
        if CHECKPOINT_TAG in version.tags and (stored := stored_policy(version, model, settings)):
            return stored
        source = version.source
        if not source.startswith("file://"):
            raise InputError(f"{model} lies at {source}, which this machine cannot read: use one whose source is local")
        return Path(unquote(urlsplit(source).path))
    if (Path(model) / "config.json").is_file():
        check_export(Path(model))
        if is_classifier(Path(model)):
            raise InputError(f"{model} is a sequence classifier, such as a reward model: only a policy can be sampled")
        return Path(model).absolute()
    if "/" in model:
        raise InputError(f"{model} is no Hugging Face folder (no config.json): give a folder, a run or models:/…")
    policy = find_policy(model)
    made, weights = open_store(settings.store_root).fetch(policy.checkpoint.bare()), policy.spec.evaluation.weights
    return made / (weights if (made / weights).is_dir() else "policy")


def is_classifier(folder: Path) -> bool:
    """Whether the model there is a sequence classifier, as reward models are."""
    try:
        architectures = json.loads((folder / "config.json").read_bytes())["architectures"]
    except (ValueError, KeyError, TypeError):
        return False  # whoever loads it says what is wrong
    return any(str(name).endswith("ForSequenceClassification") for name in architectures or ())


def stored_policy(version: Version, name: str, settings: Settings) -> Path | None:
    """The folder of the policy in our store that a version's lineage names, wherever MLflow sees it; None if gone."""
    part = version.tags.get(SOURCE_TAG, "policy").rpartition("/")[2]
    with suppress(ArtifactMissing):
        return open_store(settings.store_root).fetch(checkpoint_of(version, name)) / part
    return None
