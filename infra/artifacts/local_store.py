"""The artifact store in a local folder: `<root>/<kind>/<key>/` with the files and their `manifest.json`.

An artifact is written beside (in `<root>/scratch`), every file and folder of it is synced, and one rename makes it
visible; then the parent is synced. So a crash at any moment leaves the artifact complete or absent.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from infra.artifacts.integrity import Checker, commit_manifest, content_of, describe
from infra.artifacts.manifest import (
    MANIFEST_NAME,
    ArtifactCorrupted,
    ArtifactInvalid,
    ArtifactMissing,
    ArtifactRef,
    Manifest,
    damaged,
    installed_libraries,
    parse_manifest,
    require_digest,
    validate_name,
)
from infra.process_identity import ProcessIdentity, this_process
from infra.storage.filesystem import (
    FileSystem,
    LocalFiles,
    StoreReadOnly,
    make_folders,
    read_whole,
    remove_tree,
    writing_to,
)

# What a reader can meet where the collector takes an artifact away that it has not pinned.
COLLECTED_ERRORS = (ArtifactCorrupted, FileNotFoundError)
TAKEN_ERRORS = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class LocalStore:
    """An `ArtifactStore` in a folder; safe for several threads and processes at once.

    `libraries` are the versions that manifests name: without any, those of the installed ones. `writer` is the process
    whose name scratch folders bear, so that they can be removed once it is gone: without any, this one.
    """

    def __init__(
        self,
        root: Path,
        *,
        files: FileSystem | None = None,
        libraries: Mapping[str, str] | None = None,
        writer: ProcessIdentity | None = None,
    ) -> None:
        self._root = root
        self._files: FileSystem = LocalFiles() if files is None else files
        self._writer = writer
        self._given_libraries = libraries
        self._checker = Checker(self._files)
        self._made: set[Path] = set()

    @property
    def root(self) -> str:
        """The absolute path of the store's folder."""
        return str(self._root)

    @cached_property
    def _libraries(self) -> Mapping[str, str]:
        return installed_libraries() if self._given_libraries is None else self._given_libraries

    def put(self, folder: Path, kind: str, key: str, inputs: Sequence[ArtifactRef] = ()) -> ArtifactRef:
        """Store a folder and take it away from where it was; see `ArtifactStore.put`."""
        place, folder = self._place(kind, key), folder.absolute()
        self._refuse_own(folder)
        with writing_to(self._root):
            manifest = self._adopt(kind, key)
            if manifest is None:
                names = content_of(self._files, folder, kind, key)
                manifest = self._store(folder, names, place, inputs)
            status = self._files.status(folder)
            if status is not None and status.kind == "folder":
                remove_tree(self._files, folder)
        return self._reference(manifest)

    def fetch(self, ref: ArtifactRef) -> Path:
        """The artifact's folder, checked; see `ArtifactStore.fetch`."""
        self._checked(ref)
        return self._place(ref.kind, ref.key)

    def check(self, ref: ArtifactRef) -> int:
        """Read every byte of an artifact; see `ArtifactStore.check`."""
        return sum(entry.size for entry in self._checked(ref, again=True).files.values())

    def _checked(self, ref: ArtifactRef, *, again: bool = False) -> Manifest:
        manifest = self.manifest(ref)
        require_digest(manifest, ref)
        place = self._place(ref.kind, ref.key)
        try:
            self._checker.check_content(place, manifest, again=again)
        except COLLECTED_ERRORS as error:
            if self._files.status(place) is None:
                raise self._missing(ref) from error
            raise
        return manifest

    def find(self, kind: str, key: str) -> ArtifactRef | None:
        """The reference of a stored artifact, or None; see `ArtifactStore.find`."""
        place = self._place(kind, key)
        try:
            manifest = self._read_manifest(kind, key)
            if manifest is None:
                return None
            self._checker.check_sizes(place, manifest)
        except COLLECTED_ERRORS:
            if self._files.status(place) is None:
                return None
            raise
        return self._reference(manifest)

    def set_aside(self, kind: str, key: str, *, digest: str | None = None) -> Path | None:
        """Move a damaged artifact to `<root>/damaged/<kind>-<key>-<n>`; see `ArtifactStore.set_aside`."""
        place = self._place(kind, key)
        if self._files.status(place) is None:
            return None
        with writing_to(self._root):
            self._make(aside := self._root / "damaged")
            # Without the lock, the second of two processes could move away what the first has made again.
            with self._files.exclusive(self._root / ".lock"):
                status = self._files.status(place)
                if status is None:
                    return None
                # A commit can replace an empty folder while we look at it, so that one is never moved.
                if status.kind == "folder" and not self._files.names(place):
                    self._files.remove_folder(place)
                    return None
                manifest = self._whole(kind, key)
                if manifest is not None and digest in (None, manifest.digest):
                    return None
                return self._move_aside(place, aside)

    def scratch(self) -> Path:
        """A new empty folder on the store's own disk."""
        parent = self._root / "scratch"
        with writing_to(self._root):
            self._make(parent)
            self._require_writable(parent)
            writer = self._writer or this_process()
            self._files.make_folder(folder := parent / f"{writer.token}-{uuid4().hex}")
        return folder

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """The manifest of an artifact."""
        manifest = self._read_manifest(ref.kind, ref.key)
        if manifest is not None:
            return manifest
        if self._files.status(place := self._place(ref.kind, ref.key)) is None:
            raise self._missing(ref)
        raise damaged(ref.kind, ref.key, f"is not in {place}")

    def location(self, ref: ArtifactRef) -> str:
        """The file:// uri of the artifact's folder; see `ArtifactStore.location`."""
        self.manifest(ref)
        return self._place(ref.kind, ref.key).as_uri()

    def _missing(self, ref: ArtifactRef) -> ArtifactMissing:
        return ArtifactMissing(
            f"the store {self._root} holds no artifact {ref.kind}/{ref.key} (made as {ref.uri}): "
            "open the store that does, or make it again"
        )

    def _place(self, kind: str, key: str) -> Path:
        validate_name("kind", kind)
        validate_name("key", key)
        return self._root.joinpath(kind, key)

    def _reference(self, manifest: Manifest) -> ArtifactRef:
        place = self._place(manifest.kind, manifest.key)
        return ArtifactRef(kind=manifest.kind, uri=place.as_uri(), digest=manifest.digest)

    def _read_manifest(self, kind: str, key: str) -> Manifest | None:
        path = self._place(kind, key) / MANIFEST_NAME
        status = self._files.status(path)
        if status is None:
            return None
        if status.kind != "file":
            raise damaged(kind, key, f"is a {status.kind}, not a file")
        try:
            content = read_whole(self._files, path)
        except FileNotFoundError:
            # Collected since.
            return None
        return parse_manifest(content, kind, key)

    def _whole(self, kind: str, key: str) -> Manifest | None:
        """The manifest of an artifact of which every byte is right; what was remembered does not count here."""
        try:
            manifest = self._read_manifest(kind, key)
            if manifest is not None:
                self._checker.check_content(self._place(kind, key), manifest, again=True)
        except COLLECTED_ERRORS:
            return None
        return manifest

    def _adopt(self, kind: str, key: str) -> Manifest | None:
        """What is there already, if it is undamaged."""
        manifest = self._whole(kind, key)
        if manifest is not None:
            # Whoever put it there may have died before its name was durable.
            self._make(parent := self._root / kind)
            self._files.sync_folder(parent)
        return manifest

    def _store(self, folder: Path, names: Sequence[str], place: Path, inputs: Sequence[ArtifactRef]) -> Manifest:
        kind, key = place.parent.name, place.name
        self._make(place.parent)
        self._require_writable(place.parent)
        staged = folder if self._same_disk(folder) else self._copy(folder, names)
        try:
            manifest, described = describe(self._files, staged, names, kind, key, inputs, self._libraries)
            commit_manifest(self._files, staged, manifest)
            while not self._publish(staged, place):
                adopted = self._adopt(kind, key)
                if adopted is not None:
                    return adopted
                self.set_aside(kind, key)
            self._checker.written(place, described)
            return manifest
        finally:
            if staged != folder:
                self._discard(staged)

    def _publish(self, staged: Path, place: Path) -> bool:
        """The one step that makes an artifact visible; False if the place is taken."""
        try:
            self._files.rename(staged, place)
        except OSError as error:
            if error.errno in TAKEN_ERRORS:
                return False
            raise
        self._files.sync_folder(place.parent)
        return True

    def _copy(self, folder: Path, names: Sequence[str]) -> Path:
        staged = self.scratch()
        try:
            for name in names:
                for above in reversed(Path(name).parents):
                    self._files.make_folder(staged / above)
                self._files.write(staged / name, self._files.blocks(folder / name))
        except OSError:
            self._discard(staged)
            raise
        return staged

    def _discard(self, staged: Path) -> None:
        with suppress(OSError):
            if self._files.status(staged) is not None:
                remove_tree(self._files, staged)

    def _move_aside(self, place: Path, folder: Path) -> Path | None:
        number = 1
        while self._files.status(aside := folder / f"{place.parent.name}-{place.name}-{number}") is not None:
            number += 1
        try:
            self._files.rename(place, aside)
        except FileNotFoundError:
            return None  # collected since
        self._files.sync_folder(folder)
        self._files.sync_folder(place.parent)
        return aside

    def _same_disk(self, folder: Path) -> bool:
        ours, theirs = self._files.status(self._root), self._files.status(folder)
        return ours is not None and theirs is not None and ours.device == theirs.device

    def _make(self, folder: Path) -> None:
        if folder not in self._made:
            make_folders(self._files, folder, top=self._root)
            self._made.add(folder)

    def _refuse_own(self, folder: Path) -> None:
        root, real = self._root.resolve(), folder.resolve()
        in_scratch = real.is_relative_to(root / "scratch") and real != root / "scratch"
        if root.is_relative_to(real) or (real.is_relative_to(root) and not in_scratch):
            raise ArtifactInvalid(
                f"folder {folder} belongs to the store {self._root}: copy it to a scratch folder first"
            )

    def _require_writable(self, folder: Path) -> None:
        if not self._files.writable(folder):
            raise StoreReadOnly(self._root, folder)
