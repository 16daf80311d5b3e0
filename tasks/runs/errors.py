"""What can go wrong in a run, for those who show it to people."""

from __future__ import annotations

from infra.artifacts.manifest import ArtifactError
from infra.engines.protocol import EngineError, EngineJobError
from infra.hub.sources import HubError, HubUnavailable
from infra.mlflow.model_files import ModelFolderError
from infra.mlflow.registry import RegistryError
from infra.prefect_server import PrefectServerError
from infra.runs.lease import LeaseHeld, LeaseLost
from infra.runs.records import InvalidRunName, RecordError
from infra.storage.filesystem import StoreReadOnly, StoreUnsupported
from infra.storage.objects import StoreUnavailable
from ppo_core.records import InputError
from ppo_core.spec import SpecError
from tasks.runs.guards import DivergedError
from tasks.stages.jobs import DiskSpaceError

FAILURES = (
    ArtifactError,
    DiskSpaceError,
    DivergedError,
    EngineError,
    HubError,
    HubUnavailable,
    InputError,
    InvalidRunName,
    LeaseHeld,
    LeaseLost,
    PrefectServerError,
    RecordError,
    ModelFolderError,
    RegistryError,
    SpecError,
    StoreReadOnly,
    StoreUnavailable,
    StoreUnsupported,
)
"""Shown as a message, not as a traceback."""

NOT_FINITE = "FloatingPointError: "


def not_finite(error: EngineError) -> str | None:
    """What the training engine said when it gave up over numbers that are not finite; None for any other error."""
    if isinstance(error, EngineJobError) and error.reason.startswith(NOT_FINITE):
        return error.reason.removeprefix(NOT_FINITE)
    return None


def behind(error: BaseException, *kinds: type[BaseException]) -> BaseException | None:
    """The error of these kinds that this one came of, or this one itself; None where there is none."""
    before: BaseException | None = error
    while before is not None and not isinstance(before, kinds):
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    return before
