"""Writing the manifest of a folder, and checking a folder against one."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.artifacts.manifest import (
    MANIFEST_NAME,
    ArtifactCorrupted,
    ArtifactError,
    ArtifactInvalid,
    ArtifactRef,
    FileEntry,
    Manifest,
    is_foreign,
    make_manifest,
    parse_manifest,
)
from infra.storage.filesystem import FileSystem, Status, read_whole, tree

PARTIAL_NAME = f"{MANIFEST_NAME}.partial"
HASH_THREADS = 4
# Below this, threads cost more than they bring.
CONCURRENT_BYTES = 64 * 2**20
# A file that changed this recently may change again within the same time stamp, so its check is not remembered.
SETTLED_NS = 2 * 10**9
MILLISECOND_NS = 10**6
# So far apart are the time stamps of Linux's own file systems, at most (100 timer ticks a second).
TICK_NS = 10 * MILLISECOND_NS

Signature = tuple[tuple[str, Status], ...]


def content_of(files: FileSystem, folder: Path, kind: str, key: str) -> list[str]:
    """The names of the files that will make up artifact `kind`/`key`, or ArtifactInvalid; writes nothing."""
    status = files.status(folder)
    if status is None or status.kind != "folder":
        raise ArtifactInvalid(f"{folder} is no folder: give the folder that holds the files of {kind}/{key}")
    found = tree(files, folder)
    for name, entry in found.items():
        if entry.kind != "file":
            complaint = "an artifact holds plain files only, put its content there"
            raise ArtifactInvalid(f"{folder / name} is a {entry.kind}, not a file: {complaint}")
        if not name.isprintable():
            raise ArtifactInvalid(f"{folder} holds a file named {name!r}: rename it to printable UTF-8")
    if found.pop(MANIFEST_NAME, None) is not None:
        _require_leftover(files, folder, kind, key)
    found.pop(PARTIAL_NAME, None)
    names = [name for name in found if not is_foreign(name)]
    if not names:
        raise ArtifactInvalid(f"folder {folder} for {kind}/{key} holds no file: an artifact needs at least one")
    return names


def _require_leftover(files: FileSystem, folder: Path, kind: str, key: str) -> None:
    """A manifest that an interrupted `put` left here will be replaced; any other is the user's and refused."""
    try:
        parse_manifest(read_whole(files, folder / MANIFEST_NAME), kind, key)
    except ArtifactError as error:
        raise ArtifactInvalid(
            f"{folder / MANIFEST_NAME}: the store writes a file of this name itself: give yours another name"
        ) from error


def commit_manifest(files: FileSystem, folder: Path, manifest: Manifest) -> None:
    """Make a folder durable and put its manifest in as the last file."""
    for name in manifest.files:
        files.sync_file(folder / name)
    below = {above for name in manifest.files for above in Path(name).parents if above != Path()}
    for above in sorted(below, key=lambda path: (-len(path.parts), path)):
        files.sync_folder(folder / above)
    partial = folder / PARTIAL_NAME
    if files.status(partial) is not None:
        files.remove(partial)
    files.write(partial, [manifest.to_bytes()])
    files.protect(partial)
    files.sync_file(partial)
    files.rename(partial, folder / MANIFEST_NAME)
    files.sync_folder(folder)


def describe(
    files: FileSystem,
    folder: Path,
    names: Sequence[str],
    kind: str,
    key: str,
    inputs: Sequence[ArtifactRef],
    libraries: Mapping[str, str],
) -> tuple[Manifest, Signature]:
    """The manifest of these files, which are read-only from here on, and what they were when their bytes were read."""
    found = list[tuple[str, Status]]()
    for name in names:
        files.protect(folder / name)
        status = files.status(folder / name)
        if status is None:
            raise FileNotFoundError(f"{folder / name} was taken away while it was stored")
        found.append((name, status))
    content = hash_files(files, folder, names, sum(status.size for _, status in found))
    return make_manifest(kind, key, content, inputs, libraries), tuple(found)


def hash_files(files: FileSystem, folder: Path, names: Sequence[str], size: int) -> dict[str, FileEntry]:
    """The sha256 and size of each file, read in blocks; several at a time where there is much to read."""

    def entry(name: str) -> FileEntry:
        digest, count = hashlib.sha256(), 0
        for block in files.blocks(folder / name):
            digest.update(block)
            count += len(block)
        return FileEntry(sha256=digest.hexdigest(), size=count)

    if size < CONCURRENT_BYTES or len(names) == 1:
        return {name: entry(name) for name in names}
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="sha256") as pool:
        return dict(zip(names, pool.map(entry, names), strict=True))


class Checker:
    """Checks folders against their manifests, and remembers which content it has found good.

    What it remembers is bound to size, inode and time stamps of each file, so a file that was written to since is read
    again.
    """

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self._mutex = threading.Lock()
        self._good: dict[Path, Signature] = {}

    def check_sizes(self, place: Path, manifest: Manifest) -> Signature:
        """Every file of the manifest is there with its size, and no other but those of other programs."""
        found = tree(self._files, place)
        for name, entry in manifest.files.items():
            status = found.get(name)
            if status is None:
                raise corrupted(manifest, name, f"{entry.size} bytes", "no such file")
            if status.kind != "file":
                raise corrupted(manifest, name, "a file", f"a {status.kind}")
            if status.size != entry.size:
                raise corrupted(manifest, name, f"{entry.size} bytes", f"{status.size} bytes")
        for name in found:
            if name not in manifest.files and name != MANIFEST_NAME and not is_foreign(name):
                raise corrupted(manifest, name, "no such file", f"{found[name].size} bytes")
        return tuple((name, found[name]) for name in manifest.files)

    def check_content(self, place: Path, manifest: Manifest, *, again: bool = False) -> None:
        """Sizes, and the sha256 of each file unless they were found good before (or must be read `again`)."""
        signature = self.check_sizes(place, manifest)
        with self._mutex:
            known = self._good.get(place) == signature
        if known and not again:
            return
        started = time.time_ns()
        actual = hash_files(self._files, place, list(manifest.files), sum(status.size for _, status in signature))
        for name, entry in manifest.files.items():
            if actual[name] != entry:
                raise corrupted(manifest, name, f"sha256 {entry.sha256}", f"sha256 {actual[name].sha256}")
        if all(status.changed_ns < started - SETTLED_NS for _, status in signature):
            with self._mutex:
                self._good[place] = signature

    def written(self, place: Path, described: Signature) -> None:
        """Remember what its writer has described and put there, if any change from now on would show.

        It would where files have finer time stamps than milliseconds, and the last of these is of a moment ago.
        """
        changed = [status.changed_ns for _, status in described]
        fine = any(stamp % MILLISECOND_NS for stamp in changed)
        if fine and max(changed) < time.time_ns() - TICK_NS:
            with self._mutex:
                self._good[place] = described

    def trust(self, place: Path, manifest: Manifest) -> None:
        """Remember content as good that its writer has hashed, under a name that nobody else knew, just now."""
        signature = self.check_sizes(place, manifest)
        with self._mutex:
            self._good[place] = signature


def corrupted(manifest: Manifest, name: str, expected: str, found: str) -> ArtifactCorrupted:
    """The complaint about one file of an artifact."""
    return ArtifactCorrupted(
        f"artifact {manifest.kind}/{manifest.key}: file {name}: expected {expected}, found {found}: "
        "set it aside and make it again"
    )
