"""A store on a simulated disk: how tests open it, fill it and look into it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from infra.artifacts import ArtifactCorrupted, ArtifactRef
from infra.artifacts.integrity import PARTIAL_NAME
from infra.artifacts.local_store import LocalStore
from infra.artifacts.manifest import MANIFEST_NAME
from infra.gc.local_collector import LocalCollector
from infra.process_identity import ProcessIdentity
from infra.storage.filesystem import FileSystem, read_whole, tree
from tests.infra.runs.leases import somebody
from tests.infra.storage.simulated_disk import SimulatedDisk

ROOT = Path("/disk/store")
NOBODY = somebody()
DAMAGED = "damaged"


def fresh_disk() -> SimulatedDisk:
    """A disk with an empty folder for a store."""
    disk = SimulatedDisk()
    disk.make_folder(ROOT.parent)
    disk.sync_folder(ROOT.parent.parent)
    return disk


def open_on(files: FileSystem, writer: ProcessIdentity = NOBODY) -> LocalStore:
    """The store as a new process opens it."""
    return LocalStore(ROOT, files=files, libraries={}, writer=writer)


def collector_on(files: FileSystem, identity: ProcessIdentity = NOBODY) -> LocalCollector:
    """A collector that finds every other process dead."""
    return LocalCollector(ROOT, files=files, identity=identity, alive=lambda other: other == identity)


def fill(files: FileSystem, folder: Path, content: dict[str, bytes]) -> Path:
    """Write files into a folder, as an engine does: without any sync."""
    for name, data in content.items():
        for above in reversed((folder / name).relative_to(folder).parents):
            files.make_folder(folder / above)
        files.write(folder / name, [data])
    return folder


def put(
    files: FileSystem, kind: str, key: str, content: dict[str, bytes], writer: ProcessIdentity = NOBODY
) -> ArtifactRef:
    """Make an artifact and store it."""
    store = open_on(files, writer)
    return store.put(fill(files, store.scratch(), content), kind, key)


def read(files: FileSystem, folder: Path) -> dict[str, bytes]:
    """All files of an artifact but its manifest."""
    names = [name for name in tree(files, folder) if name not in (MANIFEST_NAME, PARTIAL_NAME)]
    return {name: read_whole(files, folder / name) for name in names}


def look(files: FileSystem, kind: str, key: str) -> dict[str, bytes] | str | None:
    """What a new process finds: the artifact's files, `DAMAGED` or None."""
    store = open_on(files)
    with suppress(ArtifactCorrupted):
        ref = store.find(kind, key)
        return None if ref is None else read(files, store.fetch(ref))
    return DAMAGED
