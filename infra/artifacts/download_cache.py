"""Local copies of artifacts of a remote store, in a folder that several processes of this machine share.

    <cache>/artifacts/<digest>/   one complete artifact; its name is the digest, so it is right for every store
    <cache>/scratch/<writer>-…/   what is being made or downloaded
    <cache>/trash/…/              what is being removed
    <cache>/locks/…               lock files; whoever dies frees his

An entry is filled in scratch and checked there, and one rename makes it visible, so a process that is killed leaves
nothing that could be taken for complete. Nothing is synced: after a power cut an entry may be damaged, but each process
reads an entry through once before it trusts it, and a damaged one is only fetched again.

When there is more than the limit, those go that were fetched the longest ago, but none that was fetched within the last
half hour: whoever fetches an artifact hands its path to an engine, and an engine that has not read its input by then
has run into its own timeout (what it has open stays readable anyway). The time of the last fetch is that of the folder
itself. It is set, and an entry is taken away, only under one lock, so an entry that was just handed out is never
removed. Marks of living processes are not needed for that, and would keep everything for as long as a run takes; with
a time that all see, nobody needs to know who lives, and in which container.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from infra.artifacts.integrity import PARTIAL_NAME, Checker
from infra.artifacts.manifest import MANIFEST_NAME, ArtifactError, Manifest, parse_manifest
from infra.process_identity import identity_of_token, is_alive, this_process
from infra.storage.filesystem import FileSystem, LocalFiles, StoreReadOnly, read_whole, remove_tree, tree, writing_to

HELD_S = 1800.0
ABANDONED_S = 24 * 3600.0
# Two artifacts whose digests begin the same wait for each other; that is all.
LOCK_LETTERS = 2
TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST})


@dataclass(frozen=True)
class _Entry:
    place: Path
    size: int
    fetched: float


class ArtifactCache:
    """The copies in one folder; safe for several threads and processes at once.

    `limit_bytes` may be exceeded by what is in use. `held_s` is for how long a fetched copy is sure to stay.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        files: FileSystem | None = None,
        held_s: float = HELD_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._limit = limit_bytes
        self._files: FileSystem = LocalFiles() if files is None else files
        self._held_s = held_s
        self._now = now
        self._checker = Checker(self._files)
        self._entries = folder / "artifacts"

    def get(self, digest: str) -> Path | None:
        """The copy of the artifact with this digest, if there is one and every byte of it is right."""
        place = self._entries / digest
        if not self._stamp(place):
            return None
        manifest = self._manifest(place)
        if manifest is not None:
            try:
                self._checker.check_content(place, manifest)
                return place
            except (ArtifactError, FileNotFoundError):
                pass
            except OSError as error:
                if error.errno != errno.EIO:  # bytes that the disk does not give back
                    raise
        self._take_away(place)
        return None

    def get_or_fill(self, digest: str, fill: Callable[[Path], Manifest]) -> Path:
        """The copy of the artifact with this digest; if there is none, `fill` makes it in an empty folder.

        What `fill` leaves there must be right and have this digest. One process at a time fills, the others wait.
        """
        place = self.get(digest)
        if place is not None:
            return place
        with self._writing():
            self._make("locks")
            with self._files.exclusive(self.folder / "locks" / digest[:LOCK_LETTERS]):
                place = self.get(digest)
                if place is not None:
                    return place
                staged = self.scratch()
                try:
                    manifest = fill(staged)
                    return self._keep(staged, manifest)
                finally:
                    self._discard(staged)

    def take(self, folder: Path, manifest: Manifest) -> None:
        """Move a folder of files that are as the manifest says into the cache, or remove it where that cannot be."""
        with self._writing():
            try:
                self._keep(folder, manifest)
            finally:
                self._discard(folder)

    def scratch(self) -> Path:
        """A new empty folder on the cache's own disk."""
        with self._writing():
            parent = self._make("scratch")
            if not self._files.writable(parent):
                raise StoreReadOnly(self.folder, parent, what="cache")
            folder = parent / f"{this_process().token}-{uuid4().hex}"
            self._files.make_folder(folder)
        return folder

    def owns(self, folder: Path) -> bool:
        """Whether a folder is the cache's own, so that it may not be put into a store from there."""
        root, real = self.folder.resolve(), folder.resolve()
        in_scratch = real.is_relative_to(root / "scratch") and real != root / "scratch"
        return root.is_relative_to(real) or (real.is_relative_to(root) and not in_scratch)

    def make_room(self, size: int = 0) -> None:
        """Remove what processes that are gone have left, and what is over the limit with `size` bytes more."""
        self._remove_leftovers()
        self._evict(self._limit - size)

    def _writing(self) -> AbstractContextManager[None]:
        return writing_to(self.folder, what="cache")

    def _keep(self, staged: Path, manifest: Manifest) -> Path:
        """Make a folder the entry of its digest."""
        place = self._make("artifacts") / manifest.digest
        for name in manifest.files:
            self._files.protect(staged / name)
        for leftover in (PARTIAL_NAME, MANIFEST_NAME):
            if self._files.status(staged / leftover) is not None:
                self._files.remove(staged / leftover)
        self._files.write(staged / PARTIAL_NAME, [manifest.to_bytes()])
        self._files.protect(staged / PARTIAL_NAME)
        self._files.rename(staged / PARTIAL_NAME, staged / MANIFEST_NAME)
        for _ in range(2):
            try:
                self._files.rename(staged, place)
                break
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
            # Somebody was faster; what he has may still be damaged.
            found = self.get(manifest.digest)
            if found is not None:
                return found
        self._checker.trust(place, manifest)
        self._stamp(place)
        self.make_room()
        return place

    def _manifest(self, place: Path) -> Manifest | None:
        try:
            content = read_whole(self._files, place / MANIFEST_NAME)
            document = json.loads(content)
            manifest = parse_manifest(content, str(document["kind"]), str(document["key"]))
        except (OSError, ValueError, KeyError, TypeError, ArtifactError):
            return None
        return manifest if manifest.digest == place.name else None

    def _stamp(self, place: Path) -> bool:
        """Note that an entry is in use from now on; False if there is none."""
        if self._files.status(place) is None:
            return False
        with self._writing(), self._files.exclusive(self.folder / ".lock"):
            now = self._now()
            try:
                os.utime(place, (now, now))
            except FileNotFoundError:
                return False
        return True

    def _take_away(self, place: Path, *, unused_since: float | None = None) -> bool:
        """Move an entry out of sight and remove it; not if it was fetched after `unused_since`."""
        with self._writing():
            trash = self._make("trash") / f"{place.name[:16]}-{uuid4().hex}"
            with self._files.exclusive(self.folder / ".lock"):
                try:
                    if unused_since is not None and place.stat().st_mtime > unused_since:
                        return False
                    self._files.rename(place, trash)
                except FileNotFoundError:
                    return False
            self._discard(trash)
        return True

    def _evict(self, limit: int) -> None:
        entries = sorted(self._all(), key=lambda entry: entry.fetched)
        total = sum(entry.size for entry in entries)
        unused_since = self._now() - self._held_s
        for entry in entries:
            if total <= limit or entry.fetched > unused_since:
                return
            if self._take_away(entry.place, unused_since=unused_since):
                total -= entry.size

    def _all(self) -> list[_Entry]:
        found = []
        for place in self._names("artifacts"):
            with suppress(FileNotFoundError):
                size = sum(status.size for status in tree(self._files, place).values())
                found.append(_Entry(place, size, place.stat().st_mtime))
        return found

    def _remove_leftovers(self) -> None:
        for folder in self._names("trash"):
            self._discard(folder)
        for folder in self._names("scratch"):
            writer = identity_of_token(folder.name.rpartition("-")[0])
            alive = None if writer is None else is_alive(writer)
            with suppress(FileNotFoundError):
                # Of a process in another container nobody here can tell.
                if alive is False or (alive is None and folder.stat().st_mtime < self._now() - ABANDONED_S):
                    self._discard(folder)

    def _names(self, below: str) -> list[Path]:
        try:
            return [self.folder / below / name for name in self._files.names(self.folder / below)]
        except FileNotFoundError:
            return []

    def _make(self, below: str) -> Path:
        folder = self.folder / below
        if self._files.status(folder) is None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _discard(self, folder: Path) -> None:
        # Another process may be removing the same; what cannot be removed now is removed the next time.
        with suppress(OSError):
            if self._files.status(folder) is not None:
                remove_tree(self._files, folder)
