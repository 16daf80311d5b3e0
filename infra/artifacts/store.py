"""Artifacts: immutable folders of files, stored under a kind and a key and named by references.

A store is opened with `open_store`. An artifact appears in it complete, in one atomic step, or not at all; what is read
from it is checked against its manifest. One store object should serve a whole process: it remembers its checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from infra.artifacts.manifest import (
    ArtifactRef,
    Manifest,
)


class ArtifactStore(Protocol):
    """Where artifacts live."""

    @property
    def root(self) -> str:
        """The address with which `open_store` opens this store again."""

    def put(self, folder: Path, kind: str, key: str, inputs: Sequence[ArtifactRef] = ()) -> ArtifactRef:
        """Store a folder under `kind` and `key` and take it away from where it was.

        When this returns, the artifact is durable. If the store has the key already, what it has is kept, the given
        folder is removed and the existing artifact's reference returned; a damaged one is set aside and replaced. After
        an error the call can be repeated: nothing is lost. `inputs` are recorded as lineage.
        """

    def fetch(self, ref: ArtifactRef) -> Path:
        """The artifact's folder on this machine, checked; not to be written to.

        Raises ArtifactMissing, ArtifactCorrupted (naming file, expected and found) or ArtifactFormatTooNew.
        """

    def check(self, ref: ArtifactRef) -> int:
        """Read every byte that the store itself has of an artifact, whatever was checked before; how many there are.

        Raises as `fetch` does.
        """

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """The reference of what is stored under `kind` and `key`, or None.

        Looks at the manifest and at the sizes of the files and raises ArtifactCorrupted where they do not fit.
        """

    def set_aside(self, kind: str, key: str, *, digest: str | None = None) -> Path | str | None:
        """Move a damaged artifact away so that it can be made again, and say where it is kept.

        Checks everything first: an undamaged one stays (None), unless its digest is not the `digest` asked for.
        """

    def scratch(self) -> Path:
        """A new empty folder on the store's own disk, to write an artifact into."""

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest of an artifact."""

    def location(self, ref: ArtifactRef) -> str:
        """The uri of the folder that holds the artifact's files, for other programs; it need not be `ref.uri`."""
