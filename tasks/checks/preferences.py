"""What a training on preferences needs, looked at before anything starts."""

from __future__ import annotations

from infra.artifacts import open_store
from infra.settings import Settings
from ppo_core.spec import DpoSpec, RewardModelSpec
from tasks.checks.hub import find_sources
from tasks.checks.preflight import preflight
from tasks.preferences.context import DpoContext, RewardModelContext
from tasks.preferences.kept import with_own_commits


def check_preferences(spec: RewardModelSpec | DpoSpec, run: str) -> list[str]:
    """Raise InputError (or another error of `tasks.runs.errors`) where it could not come far; else notes for people."""
    notes, store = preflight(spec), open_store(Settings().store_root)
    flow = (DpoContext if isinstance(spec, DpoSpec) else RewardModelContext).flow
    _, more, missing = find_sources(with_own_commits(store.root, spec, run, flow, keep=False), store)
    return [*notes, *more, *(f"{one}, which is downloaded first" for one in missing)]
