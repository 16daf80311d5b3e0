"""Engines that start while Prefect's server does: imports are most of what either takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from infra.engines.process import EngineProcess
from infra.settings import Settings
from ppo_core.spec.flow_spec import FlowSpec
from ppo_core.spec.paths import is_function
from tasks.stages.engine_programs import plan_engines
from tasks.stages.engines import Engines

SCORING_ALONE = frozenset({"scoring"})
"""What starts for a run for which all was made before: the engine that says whether the user's code has changed."""
EARLY: ContextVar[tuple[str, FlowSpec, Engines] | None] = ContextVar("early", default=None)
"""The engines that were started for a run and its spec, and are not yet in use."""


@contextmanager
def started_early(
    spec: FlowSpec, run: str, checked: EngineProcess | None = None, *, only: Collection[str] | None = None
) -> Iterator[None]:
    """Have a run's engines, or `only` those of these names, import while its flow is prepared; they end with the
    context at the latest.

    The scoring engine that has `checked` the spec goes on as the run's where it has run no code of the user, who may
    change it meanwhile or keep something in it, and holds no reward model. Engines of a Ray cluster are not asked for
    before the run is known to be free.
    """
    if spec.engines.backend == "ray":
        yield
        return
    settings = Settings()
    engines = Engines(spec, settings, settings.log_folder(run), run=run)
    token = EARLY.set((run, spec, engines))
    try:
        stateless = not (spec.reward_models or spec.code or any(map(is_function, spec.data)))
        engines.start(only, checked=checked if stateless else None)
        yield
    finally:
        EARLY.reset(token)
        engines.close()


def engines_of(spec: FlowSpec, settings: Settings, run: str) -> Engines:
    """The engines of a run: those that were started early for it, else new ones, not started."""
    early = EARLY.get()
    if early is not None:
        name, started_for, engines = early
        if name == run and plan_engines(started_for) == plan_engines(spec):
            return engines
    return Engines(spec, settings, settings.log_folder(run), run=run)
