"""What a flow that was started through a deployment must know of itself: by a schedule, the UI or the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from prefect.runtime import flow_run

from infra.runs.names import RUN_NAME_LIMIT
from ppo_core.records import InputError
from ppo_core.spec import RunSpec
from ppo_core.spec.flow_spec import NamedSpec
from tasks.prefect.client import deployment_id

Spec = TypeVar("Spec", bound=NamedSpec)
MOST_STARTS = 30
STAMP = "%Y%m%d-%H%M%S"


def requested(spec: Spec, run: str | None, overrides: list[str] | None) -> tuple[Spec, str]:
    """The spec with its overrides, its folder absolute from now on, and the name of the run.

    Raises SpecError, and InputError for a flow run that has crashed so often that going on is no use.
    """
    if deployment_id() and flow_run.run_count > MOST_STARTS:
        raise InputError(
            f"this flow run was started {flow_run.run_count} times, and crashed each time: see its logs and those of "
            "its worker, then start another one with this run's name, which goes on where this one stopped"
        )
    asked = spec.with_overrides(overrides or [])
    return asked.model_copy(update={"folder": str(Path(asked.folder).absolute())}), run or name_of_run(asked.name)


def is_deployed() -> bool:
    """Whether this flow run is a deployment's: what cannot run was not refused before it."""
    return bool(deployment_id())


def is_part() -> bool:
    """Whether another flow has called the one that runs."""
    return flow_run.parent_flow_run_id is not None


def name_of_run(spec_name: str) -> str:
    """What a run without a name is called: as its spec; under a deployment besides by when it was meant to start.

    The same flow run gets the same name whenever it is started again, and so goes on; others get other ones, also
    where two are meant to start in the same second. Of a long name the beginning is taken.
    """
    if not deployment_id():
        return spec_name
    stamp = f"-{flow_run.scheduled_start_time:{STAMP}}-{str(flow_run.id)[:4]}"
    return spec_name[: RUN_NAME_LIMIT - len(stamp)] + stamp


def shown_name(kind: type[NamedSpec] = RunSpec) -> str:
    """What the flow run is called on Prefect's pages: as the training run, whose spec is of this kind."""
    given = flow_run.parameters
    run, spec, overrides = given.get("run"), given["spec"], given.get("overrides")
    name = spec.name if isinstance(spec, NamedSpec) else spec.get("name", kind.model_fields["name"].default)
    named = [text.partition("=")[2].strip() for text in overrides or [] if text.partition("=")[0].strip() == "name"]
    return str(run or name_of_run(named[-1] if named else name))
