"""The check of a spec, whatever it is the spec of."""

from __future__ import annotations

from ppo_core.spec import RlhfSpec, RunSpec
from ppo_core.spec.kinds import AnySpec
from tasks.checks.run import Findings, check_run


def check_any(spec: AnySpec, run: str | None) -> Findings:
    """What `ppoflow check` says of it. Raises what would end the run. Only what is needed is imported."""
    if isinstance(spec, RunSpec):
        return check_run(spec, run, again=True)
    if isinstance(spec, RlhfSpec):
        from tasks.checks.rlhf import check_rlhf

        return check_rlhf(spec, run, again=True)
    from tasks.checks.preferences import check_preferences

    return check_preferences(spec, run, again=True)
