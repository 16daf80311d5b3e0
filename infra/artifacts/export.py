"""A part of an artifact as a folder of its own, for other programs: a copy, with the manifest that proves it.

    <target>/…                the files, with names as they are below the part of the artifact
    <target>/manifest.json    the sha256 and size of each, and the reference of the artifact

Nothing that is done to the copy reaches the store.
"""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path

from infra.artifacts.fingerprint import file_digests
from infra.artifacts.integrity import Checker
from infra.artifacts.manifest import (
    MANIFEST_NAME,
    ArtifactCorrupted,
    ArtifactRef,
    Manifest,
    make_manifest,
    parse_manifest,
)
from infra.storage.filesystem import LocalFiles

KIND, KEY = "export", "copy"
FICLONE = 0x40049409
"""Linux's request to share a file's blocks with another file until one of them is written to."""


def export_part(artifact: Path, manifest: Manifest, ref: ArtifactRef, part: str, target: Path) -> None:
    """Make `target` a copy of the folder `part` of an artifact that lies, checked, in `artifact`.

    What was there is replaced, at the end and at once, a file or a link too; where it is this very copy, undamaged, it
    stays.
    """
    files = {
        name.removeprefix(f"{part}/"): entry for name, entry in manifest.files.items() if name.startswith(f"{part}/")
    }
    exported = make_manifest(KIND, KEY, files, [ref], manifest.libraries)
    with suppress(ArtifactCorrupted):
        there = _manifest(target)
        if there is not None and there.digest == exported.digest and check_export(target) is not None:
            return
    fresh, old = target.with_name(f"{target.name}.new"), target.with_name(f"{target.name}.old")
    for leftover in (fresh, old):
        _remove(leftover)
    for name in files:
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(artifact / part / name, fresh / name)
    (fresh / MANIFEST_NAME).write_bytes(exported.to_bytes())
    check_export(fresh)
    with suppress(FileNotFoundError):
        target.rename(old)
    fresh.rename(target)
    _remove(old)


def _remove(place: Path) -> None:
    """Remove a folder, a file, or a link and not what it leads to."""
    if place.is_file() or place.is_symlink():
        place.unlink(missing_ok=True)
    else:
        shutil.rmtree(place, ignore_errors=True)


def exported_from(folder: Path) -> ArtifactRef | None:
    """The artifact that a folder is a copy of, as its manifest says; None where that cannot be read."""
    with suppress(ArtifactCorrupted):
        manifest = _manifest(folder)
        return None if manifest is None else manifest.inputs[0]
    return None


def digests_of_source(folder: Path) -> dict[str, str]:
    """The digest of each file of a user's folder, by its relative name; see `infra.artifacts.fingerprint.file_digests`.

    The manifest of a copy does not count: it tells when the copy was made, and nothing else that is not there.
    """
    digests = file_digests(folder)
    if exported_from(folder) is not None:
        del digests[MANIFEST_NAME]
    return digests


def check_export(folder: Path) -> Manifest | None:
    """Read every byte of an exported folder; its manifest, or None for a folder that was not exported.

    Raises ArtifactCorrupted, naming file, expected and found.
    """
    while True:
        before = _inode(folder)
        try:
            return _check(folder)
        except (ArtifactCorrupted, FileNotFoundError) as error:
            if _inode(folder) != before:
                continue  # another export has taken its place meanwhile
            reason = str(error).partition(": ")[2].rpartition(": ")[0] or str(error)
            raise ArtifactCorrupted(
                f"{folder} is damaged: {reason}. Take the policy from the store instead (by its run's name, or as "
                f"models:/…), or remove {MANIFEST_NAME} there if the change is yours"
            ) from error


def _check(folder: Path) -> Manifest | None:
    manifest = _manifest(folder)
    if manifest is not None:
        Checker(LocalFiles()).check_content(folder, manifest)
    return manifest


def _manifest(folder: Path) -> Manifest | None:
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_manifest(content, KIND, KEY)


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; where the file system can, both share their blocks until one of them is changed."""
    with source.open("rb") as reading, target.open("wb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), FICLONE, reading.fileno())
        except OSError:
            shutil.copyfileobj(reading, writing, 2**20)
