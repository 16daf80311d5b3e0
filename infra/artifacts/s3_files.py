"""The files of artifacts on S3: downloaded and checked, compared by size, copied aside, removed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from infra.artifacts.integrity import corrupted
from infra.artifacts.manifest import MANIFEST_NAME, ArtifactCorrupted, Manifest, is_foreign
from infra.artifacts.s3_envelope import UPLOAD, envelope_key, read_version, upload_prefix
from infra.storage.objects import DownloadRequest, Objects, S3Address
from infra.storage.rereading import refuse_changed

# Bytes that were changed on the way come right the next time; those that lie there wrong do not.
DOWNLOADS = 3
DAMAGED = "damaged"


@dataclass(frozen=True)
class UnnamedUpload:
    """A folder of files that belongs to no artifact; `newest` says when its writer was last seen."""

    prefix: str
    bytes: int
    newest: datetime


@dataclass(frozen=True)
class KeyUploads:
    """Whether a manifest was ever written for a key, and the uploads below it that no manifest names."""

    has_manifest: bool
    unnamed: tuple[UnnamedUpload, ...]


class ArtifactFiles:
    """The files of the artifacts below one address."""

    def __init__(self, objects: Objects, address: S3Address) -> None:
        self.objects = objects
        self.address = address

    def prefix(self, manifest: Manifest, upload: str) -> str:
        """What the keys of an upload's files begin with."""
        return upload_prefix(self.address, manifest.kind, manifest.key, upload)

    def upload(self, prefix: str, files: Mapping[str, Path]) -> None:
        """Write files by their relative names."""
        self.objects.upload({prefix + name: path for name, path in files.items()})

    def download(self, manifest: Manifest, upload: str, folder: Path) -> None:
        """Make the artifact's files in a folder.

        ArtifactCorrupted if one is not what the manifest says, ChangedOnTheWay if only what comes of it is not.
        """
        prefix = self.prefix(manifest, upload)
        left = list(manifest.files)
        md5s: dict[str, set[str]] = {}
        for attempt in range(1, DOWNLOADS + 1):
            wanted = [DownloadRequest(prefix + name, manifest.files[name].size, folder / name) for name in left]
            arrived = self.objects.download(wanted)
            complaints: dict[str, ArtifactCorrupted] = {}
            for name in left:
                entry, came = manifest.files[name], arrived[prefix + name]
                if came.size is None:
                    raise corrupted(manifest, name, f"{entry.size} bytes", "no such file")
                if came.size != entry.size:
                    complaints[name] = corrupted(manifest, name, f"{entry.size} bytes", f"{came.size} bytes")
                elif came.sha256 != entry.sha256:
                    complaints[name] = corrupted(manifest, name, f"sha256 {entry.sha256}", f"sha256 {came.sha256}")
                    md5s.setdefault(name, set()).add(md5_of(folder / name))
            left = list(complaints)
            if not left:
                return
            if attempt == DOWNLOADS:
                for name in (name for name in left if name in md5s):
                    refuse_changed(
                        self.objects.bucket, prefix + name, md5s[name], self._md5_of(manifest, prefix + name)
                    )
                raise complaints[left[0]]

    def _md5_of(self, manifest: Manifest, key: str) -> str | None:
        """What S3 says is a file's md5; None where its ETags are no md5s, as that of the envelope beside it tells."""
        envelope = self.objects.read(envelope_key(self.address, manifest.kind, manifest.key))
        if envelope is None or not envelope.etag_is_md5:
            return None
        return next((found.etag for found in self.objects.entries(key) if found.key == key), None)

    def check(self, manifest: Manifest, upload: str, folder: Path) -> int:
        """Read every byte by way of a folder that is removed again; how many. ArtifactCorrupted as the others."""
        try:
            self.check_sizes(manifest, upload)
            self.download(manifest, upload, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return sum(entry.size for entry in manifest.files.values())

    def check_sizes(self, manifest: Manifest, upload: str) -> None:
        """Every file of the manifest is there with its size, and no other; ArtifactCorrupted otherwise."""
        prefix = self.prefix(manifest, upload)
        entries = (entry for entry in self.objects.entries(prefix) if not entry.key.endswith("/"))
        found = {entry.key.removeprefix(prefix): entry.size for entry in entries}
        for name, entry in manifest.files.items():
            if found.get(name) != entry.size:
                actual = f"{found[name]} bytes" if name in found else "no such file"
                raise corrupted(manifest, name, f"{entry.size} bytes", actual)
        for name, size in found.items():
            if name not in manifest.files and not is_foreign(name):
                raise corrupted(manifest, name, "no such file", f"{size} bytes")

    def copy_aside(self, kind: str, key: str, upload: str) -> str:
        """Copy an upload's files, and what manifest there is, below damaged/; the prefix of the copies.

        The name is the upload's, so that doing it twice makes one copy.
        """
        prefix = upload_prefix(self.address, kind, key, upload)
        target = self.address.key(DAMAGED, f"{kind}-{key}-{upload}") + "/"
        for entry in self.objects.entries(prefix):
            self.objects.copy(entry.key, target + entry.key.removeprefix(prefix))
        self.objects.copy(envelope_key(self.address, kind, key), target + MANIFEST_NAME)
        return target

    def copy_all_aside(self, kind: str, key: str, name: str) -> str:
        """The same of a damaged manifest and all uploads of its key, each in a folder of its own: any may be the one
        that it named, and none is named any more."""
        top, target = self.address.key(kind, key) + "/", self.address.key(DAMAGED, f"{kind}-{key}-{name}") + "/"
        for entry in self.objects.entries(top):
            self.objects.copy(entry.key, target + entry.key.removeprefix(top))
        return target

    def remove(self, prefix: str) -> None:
        """Remove everything whose key begins with `prefix`."""
        self.objects.remove([entry.key for entry in self.objects.entries(prefix)])


def md5_of(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def uploads_below(objects: Objects, address: S3Address, kind: str, key: str) -> KeyUploads:
    """What lies below a key; a writer that is still at it may have made the newest of its uploads.

    Of an artifact that is gone, the files that whoever removed it did not live to remove are not named. Where the
    manifest is damaged all count as named: nobody knows which one it named.
    """
    top = address.key(kind, key) + "/"
    has_manifest = False
    found: dict[str, list[tuple[int, datetime]]] = {}
    for entry in objects.entries(top):
        upload, slash, _ = entry.key.removeprefix(top).partition("/")
        has_manifest |= upload == MANIFEST_NAME
        if slash and UPLOAD.fullmatch(upload):
            found.setdefault(upload, []).append((entry.size, entry.modified))
    try:
        version = read_version(objects, address, kind, key) if found else None
    except ArtifactCorrupted:
        return KeyUploads(True, ())
    named = version.envelope.upload if version is not None and version.exists else None
    unnamed = (
        UnnamedUpload(f"{top}{upload}/", sum(size for size, _ in files), max(modified for _, modified in files))
        for upload, files in sorted(found.items())
        if upload != named
    )
    return KeyUploads(has_manifest, tuple(unnamed))
