"""What can go wrong in a run, for those who show it to people."""

from __future__ import annotations

from infra.engine_protocol import EngineError, EngineJobError
from infra.filesystem import StoreReadOnly, StoreUnsupported
from infra.lease import LeaseHeld, LeaseLost
from infra.manifest import ArtifactError
from infra.mlmodel import ModelFolderError
from infra.prefect_server import PrefectServerError
from infra.registry import RegistryError
from infra.runs import InvalidRunName, RecordError
from infra.s3.objects import StoreUnavailable
from ppo_core.records import InputError
from ppo_core.spec import SpecError
from tasks.guards import DiskSpaceError, DivergedError

FAILURES = (
    ArtifactError,
    DiskSpaceError,
    DivergedError,
    EngineError,
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
"""What a person is told as a message, not as a traceback."""

NOT_FINITE = "FloatingPointError: "


def not_finite(error: EngineError) -> str | None:
    """What the training engine said when it gave up over numbers that are not finite; None for any other error."""
    if isinstance(error, EngineJobError) and error.reason.startswith(NOT_FINITE):
        return error.reason.removeprefix(NOT_FINITE)
    return None
