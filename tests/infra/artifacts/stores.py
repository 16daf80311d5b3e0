"""Stores on S3 as tests need them: on one machine or another, and a look behind their back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts import ArtifactRef
from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.s3_envelope import State, move, read_version
from infra.artifacts.s3_store import S3Store
from infra.storage.objects import Objects, S3Address

PREFIX = "some/where"
LIMIT = 2**30


def machine(objects: Objects, cache: Path) -> S3Store:
    """The store as a machine with this cache sees it."""
    address = S3Address(objects.bucket, PREFIX)
    return S3Store(address, objects, ArtifactCache(cache, LIMIT), libraries={})


@dataclass(frozen=True)
class Behind:
    """A bucket as it is behind the store."""

    objects: Objects

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.objects.bucket

    @property
    def address(self) -> S3Address:
        """The address of the store."""
        return S3Address(self.bucket, PREFIX)

    def state(self, ref: ArtifactRef) -> tuple[State, str]:
        """The state of an artifact, and the name of its upload."""
        version = read_version(self.objects, self.address, ref.kind, ref.key)
        assert version is not None
        return version.envelope.state, version.envelope.upload

    def move(self, ref: ArtifactRef, *states: State) -> None:
        """What a collector does to an artifact, step by step."""
        for state in states:
            version = read_version(self.objects, self.address, ref.kind, ref.key)
            assert version is not None
            assert move(self.objects, self.address, ref.kind, ref.key, version, state) is not None

    def keys(self, below: str = "") -> list[str]:
        """The keys below a folder of the store, without what comes before."""
        prefix = f"{PREFIX}/{below}"
        return [entry.key.removeprefix(prefix) for entry in self.objects.entries(prefix)]

    def change(self, key: str, change: Callable[[bytes], bytes | None]) -> None:
        """Write something else to where a key of the store leads, or nothing."""
        found = self.objects.read(f"{PREFIX}/{key}")
        assert found is not None
        content = change(found.content)
        if content is None:
            self.objects.remove([f"{PREFIX}/{key}"])
        else:
            self.objects.write(f"{PREFIX}/{key}", content)
