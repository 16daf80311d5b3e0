"""What a run needs of this machine, looked at before anything starts: in no time, without transformers or torch."""

from __future__ import annotations

from pathlib import Path

from infra.settings import Settings
from ppo_core.spec import RunSpec, SpecError
from ppo_core.spec.flow_spec import FlowSpec
from ppo_core.spec.hub import is_hub_name
from ppo_core.spec.promotion import registered_name
from tasks.checks.disk import require_room
from tasks.checks.model_folder import check_model_folder, require_folder, require_model, transformers_may_know
from tasks.prefect.listening import require_prefect
from tasks.runs.state_folder import require_writable_state
from tasks.stages.engine_programs import scoring_environment
from tasks.stages.engines import require_shared_store

__all__ = ["check_model_folder", "preflight", "transformers_may_know"]


def preflight(spec: FlowSpec) -> list[str]:
    """Raise InputError where the run could not come far; else what a person should know before it starts.

    What is of the hub, `tasks.checks.hub` looks at.
    """
    settings = Settings()
    if isinstance(spec, RunSpec):
        require_registrable(spec)
    require_writable_state(settings)
    require_room(settings)
    require_prefect(settings.prefect_api_url)
    require_shared_store(spec, settings.store_root)
    scoring_environment(settings)
    folder = Path(spec.folder)
    notes = []
    path, tokenizer = spec.model.path, str(spec.model.tokenizer or spec.model.path)
    if path is not None and not is_hub_name(path):
        notes = check_model_folder(folder / path, trust_remote_code=settings.trust_remote_code)
        require_model(folder / path, given=path)
    for name in spec.model_folders:
        if is_hub_name(name):
            continue
        notes += check_model_folder(folder / name, trust_remote_code=settings.trust_remote_code)
        if name == spec.critic:
            require_model(folder / name, "model.critic", "sequence classifier or causal LM", name)
        else:
            require_model(folder / name, "a reward's `path`", "sequence classifier", name)
    if not is_hub_name(tokenizer):
        require_folder(folder / tokenizer, "model.tokenizer")
    return notes


def require_registrable(spec: RunSpec) -> None:
    """Raise SpecError where a model could not be registered, by a metric that no run has, or would be champion past all
    gates.

    A spec that was changed by `--set` or in a form was not read from a file, where this is refused already.
    """
    try:
        if spec.registry.model is not None:
            registered_name(spec.registry.model)
    except ValueError as error:
        raise SpecError(f"registry.model: {error}") from None
    components, gold = [reward.component for reward in spec.reward.rewards], spec.guards.gold_reward is not None
    problems = spec.registry.problems(components, critic=spec.algorithm.learns_values, gold=gold)
    if problems := [*problems, *spec.promotion.problems(spec.registry.alias)]:
        raise SpecError("; ".join(problems))
