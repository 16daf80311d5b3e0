"""What can go wrong in a run, for those who show it to people."""

from __future__ import annotations

from infra.engine_protocol import EngineError
from infra.filesystem import StoreReadOnly, StoreUnsupported
from infra.manifest import ArtifactError
from infra.mlmodel import ModelFolderError
from infra.prefect_server import PrefectServerError
from infra.registry import RegistryError
from infra.runs import InvalidRunName, RecordError
from ppo_core.records import InputError
from ppo_core.spec import SpecError

FAILURES = (
    ArtifactError,
    EngineError,
    InputError,
    InvalidRunName,
    PrefectServerError,
    RecordError,
    ModelFolderError,
    RegistryError,
    SpecError,
    StoreReadOnly,
    StoreUnsupported,
)
"""What a person is told as a message, not as a traceback."""
