"""A store over another one: everything new goes into the upper one, what the lower one has is only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infra.artifacts.manifest import ArtifactError, ArtifactRef, Manifest
from infra.artifacts.store import ArtifactStore


class OverlayStore:
    """An `ArtifactStore` that makes everything anew in `upper`, and resolves references in `lower` too."""

    def __init__(self, upper: ArtifactStore, lower: ArtifactStore) -> None:
        self._upper = upper
        self._lower = lower

    @property
    def root(self) -> str:
        """The upper store's address."""
        return self._upper.root

    def put(self, folder: Path, kind: str, key: str, inputs: Sequence[ArtifactRef] = ()) -> ArtifactRef:
        """Store into the upper store."""
        return self._upper.put(folder, kind, key, inputs)

    def fetch(self, ref: ArtifactRef) -> Path:
        """The artifact's folder in the layer that has this digest."""
        return self._holding(ref).fetch(ref)

    def check(self, ref: ArtifactRef) -> int:
        """Read every byte of the artifact in the layer that has this digest."""
        return self._holding(ref).check(ref)

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """Look in the upper store only."""
        return self._upper.find(kind, key)

    def set_aside(self, kind: str, key: str, *, digest: str | None = None) -> Path | str | None:
        """Set aside in the upper store."""
        return self._upper.set_aside(kind, key, digest=digest)

    def scratch(self) -> Path:
        """A new empty folder on the upper store's disk."""
        return self._upper.scratch()

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest in the layer that has this digest."""
        return self._holding(ref).manifest(ref)

    def location(self, ref: ArtifactRef) -> str:
        """Where the layer that has this digest keeps the files."""
        return self._holding(ref).location(ref)

    def _holding(self, ref: ArtifactRef) -> ArtifactStore:
        try:
            return self._upper if self._upper.manifest(ref).digest == ref.digest else self._lower
        except ArtifactError:
            return self._lower
