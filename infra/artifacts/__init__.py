"""Artifacts: immutable folders of files under a kind and a key, in a folder or on S3, named by references."""

from infra.artifacts.manifest import (
    ArtifactCorrupted,
    ArtifactError,
    ArtifactFormatTooNew,
    ArtifactInvalid,
    ArtifactMissing,
    ArtifactRef,
    FileEntry,
    Manifest,
)
from infra.artifacts.store import ArtifactStore
from infra.backend import open_store
from infra.storage.filesystem import StoreReadOnly, StoreUnsupported

__all__ = [
    "ArtifactCorrupted",
    "ArtifactError",
    "ArtifactFormatTooNew",
    "ArtifactInvalid",
    "ArtifactMissing",
    "ArtifactRef",
    "ArtifactStore",
    "FileEntry",
    "Manifest",
    "StoreReadOnly",
    "StoreUnsupported",
    "open_store",
]
