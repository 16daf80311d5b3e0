"""The artifact store on S3: `<prefix>/<kind>/<key>/manifest.json`, and the files in folders named by upload beside it.

    <prefix>/checkpoint/3f…/manifest.json          which upload is the artifact, and what is in it: see `envelope`
    <prefix>/checkpoint/3f…/<upload>/policy/…      the files of one upload
    <prefix>/damaged/checkpoint-3f…-<upload>/…     the files of one that was set aside

Each writer uploads into a folder of its own, and then one conditional put of `manifest.json` decides whose it is; the
others take over what the winner made. A writer that dies on the way leaves a folder that nothing names: see
`s3_files.uploads_below`, and for files that were under way `Objects.pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from infra.artifacts.download_cache import ArtifactCache
from infra.artifacts.integrity import content_of, describe
from infra.artifacts.manifest import (
    ArtifactCorrupted,
    ArtifactInvalid,
    ArtifactMissing,
    ArtifactRef,
    Manifest,
    installed_libraries,
    require_digest,
    validate_name,
)
from infra.artifacts.s3_envelope import Envelope, Version, envelope_key, manifest_of, move, parse_envelope, read_version
from infra.artifacts.s3_files import ArtifactFiles
from infra.storage.client import open_objects
from infra.storage.filesystem import LocalFiles, StoreReadOnly, remove_tree
from infra.storage.objects import Objects, S3Address

T = TypeVar("T")


def open_s3_store(root: str, cache: ArtifactCache) -> S3Store:
    """Open the store at an s3:// address; StoreRefused where the bucket or the credentials are not right."""
    address = S3Address.parse(root)
    return S3Store(address, open_objects(address.bucket), cache)


class S3Store:
    """An `ArtifactStore` below an address; safe for several threads, processes and machines at once.

    What is fetched is kept in `cache`, and what was put is there already. `libraries` are the versions that manifests
    name: without any, those of the installed ones.
    """

    def __init__(
        self,
        address: S3Address,
        objects: Objects,
        cache: ArtifactCache,
        *,
        libraries: Mapping[str, str] | None = None,
    ) -> None:
        self._address = address
        self._objects = objects
        self._cache = cache
        self._artifact_files = ArtifactFiles(objects, address)
        self._files = LocalFiles()
        self._given_libraries = libraries

    @property
    def root(self) -> str:
        """The store's address."""
        return self._address.uri

    @cached_property
    def _libraries(self) -> Mapping[str, str]:
        return installed_libraries() if self._given_libraries is None else self._given_libraries

    def put(self, folder: Path, kind: str, key: str, inputs: Sequence[ArtifactRef] = ()) -> ArtifactRef:
        """Store a folder and take it away from where it was, into the cache; see `ArtifactStore.put`."""
        _validate(kind, key)
        folder = folder.absolute()
        if self._cache.owns(folder):
            raise ArtifactInvalid(
                f"folder {folder} belongs to the cache {self._cache.folder}: copy it to a scratch folder first"
            )
        manifest = self._adopt(kind, key)
        if manifest is None:
            names = content_of(self._files, folder, kind, key)
            manifest, ours = self._store(folder, names, kind, key, inputs)
            if ours:
                # It is stored; that there is no local copy costs a download at most.
                with suppress(OSError, StoreReadOnly):
                    self._cache.take(folder, manifest)
        status = self._files.status(folder)
        if status is not None and status.kind == "folder":
            remove_tree(self._files, folder)
        return self._reference(manifest)

    def fetch(self, ref: ArtifactRef) -> Path:
        """The artifact's folder in the cache, checked; see `ArtifactStore.fetch`.

        What the cache has is right whatever has happened to the store, because the reference names its digest.
        """
        _validate(ref.kind, ref.key)
        return self._cache.get(ref.digest) or self._read(ref, self._download)

    def check(self, ref: ArtifactRef) -> int:
        """Read every byte that is on S3, whatever the cache has; see `ArtifactStore.check`."""
        return self._read(ref, self._check)

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """The reference of a stored artifact, or None; see `ArtifactStore.find`.

        One read: an object is on S3 with all its bytes or not at all. One that a collector has its eye on is saved.
        """
        _validate(kind, key)
        version = self._restored(kind, key)
        if version is None:
            return None
        return self._reference(manifest_of(version.envelope, kind, key))

    def set_aside(self, kind: str, key: str, *, digest: str | None = None) -> str | None:
        """Copy a damaged artifact to `<root>/damaged/<kind>-<key>-<upload>`; see `ArtifactStore.set_aside`."""
        _validate(kind, key)
        while True:
            try:
                version = read_version(self._objects, self._address, kind, key)
            except ArtifactCorrupted:
                if (place := self._move_unreadable_aside(kind, key)) is not None:
                    return place
                continue
            if version is None or not version.exists:
                return None
            manifest = self._sound(kind, key, version)
            if manifest is not None and digest in (None, manifest.digest) and self._is_whole(manifest, version):
                return None
            if (place := self._move_aside(kind, key, version)) is not None:
                return place

    def scratch(self) -> Path:
        """A new empty folder on the cache's disk."""
        return self._cache.scratch()

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest of an artifact."""
        return manifest_of(self._existing(ref).envelope, ref.kind, ref.key)

    def location(self, ref: ArtifactRef) -> str:
        """The s3:// uri of the folder that holds the artifact's files; see `ArtifactStore.location`."""
        return self._address.uri_of(self._address.key(ref.kind, ref.key, self._existing(ref).envelope.upload))

    def _reference(self, manifest: Manifest) -> ArtifactRef:
        uri = self._address.uri_of(self._address.key(manifest.kind, manifest.key))
        return ArtifactRef(kind=manifest.kind, uri=uri, digest=manifest.digest)

    def _existing(self, ref: ArtifactRef) -> Version:
        _validate(ref.kind, ref.key)
        version = read_version(self._objects, self._address, ref.kind, ref.key)
        if version is None or not version.exists:
            raise ArtifactMissing(
                f"the store {self.root} holds no artifact {ref.kind}/{ref.key} (made as {ref.uri}): "
                "open the store that does, or make it again"
            )
        return version

    def _read(self, ref: ArtifactRef, read: Callable[[Manifest, str], T]) -> T:
        """What `read` makes of the artifact that has the digest of the reference."""
        while True:
            version = self._existing(ref)
            manifest = manifest_of(version.envelope, ref.kind, ref.key)
            require_digest(manifest, ref)
            try:
                return read(manifest, version.envelope.upload)
            except ArtifactCorrupted:
                # It may have been collected meanwhile, or set aside and made again by another writer.
                if self._existing(ref).envelope.upload == version.envelope.upload:
                    raise

    def _check(self, manifest: Manifest, upload: str) -> int:
        return self._artifact_files.check(manifest, upload, self._cache.scratch())

    def _restored(self, kind: str, key: str) -> Version | None:
        """The version of what exists; a collector that has marked it finds that it is wanted."""
        while True:
            version = read_version(self._objects, self._address, kind, key)
            if version is None or not version.exists:
                return None
            if version.envelope.state == "live":
                return version
            restored = move(self._objects, self._address, kind, key, version, "live")
            if restored is not None:
                return restored

    def _adopt(self, kind: str, key: str) -> Manifest | None:
        """What is there already, if it is undamaged as far as its sizes show; what is not is set aside."""
        while True:
            try:
                version = self._restored(kind, key)
            except ArtifactCorrupted:
                self._move_unreadable_aside(kind, key)
                continue
            if version is None:
                return None
            manifest = self._sound(kind, key, version)
            if manifest is not None and self._has_its_sizes(manifest, version):
                return manifest
            self._move_aside(kind, key, version)

    def _store(
        self, folder: Path, names: Sequence[str], kind: str, key: str, inputs: Sequence[ArtifactRef]
    ) -> tuple[Manifest, bool]:
        """Upload and claim the key: the manifest of what is the artifact now, and whether that is ours."""
        upload = uuid4().hex
        prefix = self._address.key(kind, key, upload) + "/"
        with ThreadPoolExecutor(1, thread_name_prefix="describe") as beside:
            described = beside.submit(describe, self._files, folder, names, kind, key, inputs, self._libraries)
            self._artifact_files.upload(prefix, {name: folder / name for name in names})
            manifest, _ = described.result()
        version: Version | None = None
        while not self._claim(manifest, upload, version):
            adopted = self._adopt(kind, key)
            version = read_version(self._objects, self._address, kind, key)
            if version is not None and version.envelope.upload == upload:
                # Our claim succeeded, its answer was lost, and somebody has moved it on; what is gone is being removed.
                return (manifest, True) if version.exists else self._store(folder, names, kind, key, inputs)
            if adopted is not None:
                self._artifact_files.remove(prefix)
                return adopted, False
        return manifest, True

    def _claim(self, manifest: Manifest, upload: str, version: Version | None) -> bool:
        """The one step that makes an artifact exist; False if somebody else came first."""
        if version is not None and version.exists:
            return False
        place = envelope_key(self._address, manifest.kind, manifest.key)
        content = Envelope.of("live", upload, manifest.model_dump(mode="json")).to_bytes()
        if version is None:
            return self._objects.create(place, content) is not None
        return self._objects.replace(place, content, version.etag) is not None

    def _download(self, manifest: Manifest, upload: str) -> Path:
        def fill(folder: Path) -> Manifest:
            self._cache.make_room(sum(entry.size for entry in manifest.files.values()))
            self._artifact_files.download(manifest, upload, folder)
            return manifest

        return self._cache.get_or_fill(manifest.digest, fill)

    def _sound(self, kind: str, key: str, version: Version) -> Manifest | None:
        try:
            return manifest_of(version.envelope, kind, key)
        except ArtifactCorrupted:
            return None

    def _has_its_sizes(self, manifest: Manifest, version: Version) -> bool:
        try:
            self._artifact_files.check_sizes(manifest, version.envelope.upload)
        except ArtifactCorrupted:
            return False
        return True

    def _is_whole(self, manifest: Manifest, version: Version) -> bool:
        """Whether every byte on S3 is right; what the cache has does not count here."""
        try:
            self._check(manifest, version.envelope.upload)
        except ArtifactCorrupted:
            return False
        return True

    def _move_aside(self, kind: str, key: str, version: Version) -> str | None:
        """Copy what is there aside and let the artifact be gone; None if it was changed meanwhile."""
        upload = version.envelope.upload
        aside = self._artifact_files.copy_aside(kind, key, upload)
        if move(self._objects, self._address, kind, key, version, "gone") is None:
            return None
        self._artifact_files.remove(self._address.key(kind, key, upload) + "/")
        return self._address.uri_of(aside.rstrip("/"))

    def _move_unreadable_aside(self, kind: str, key: str) -> str | None:
        """The same where the manifest itself is damaged, so that nobody knows which files belong to it."""
        place = envelope_key(self._address, kind, key)
        found = self._objects.read(place)
        if found is None:
            return None
        with suppress(ArtifactCorrupted):
            # Somebody has mended it meanwhile.
            parse_envelope(found.content, kind, key)
            return None
        tombstone = Envelope.of("gone", uuid4().hex, {})
        aside = self._artifact_files.copy_all_aside(kind, key, tombstone.upload)
        if self._objects.replace(place, tombstone.to_bytes(), found.etag) is None:
            return None
        return self._address.uri_of(aside.rstrip("/"))


def _validate(kind: str, key: str) -> None:
    validate_name("kind", kind)
    validate_name("key", key)
