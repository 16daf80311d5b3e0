"""The collector of a local store: pinning takes the same lock as the collector's look at pins and records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from infra.artifacts.manifest import MANIFEST_NAME, is_key, is_kind
from infra.gc.collector import PinsUnreadable
from infra.gc.orphans import Orphan, StoredArtifact
from infra.process_identity import ProcessIdentity, identity_of_token, is_alive, this_process
from infra.runs.local_lease import GC_LOCK
from infra.runs.local_lease_folders import PINS, LeaseFolders
from infra.runs.local_runs import STAGED
from infra.storage.filesystem import (
    FileSystem,
    LocalFiles,
    folders,
    local_root,
    make_folders,
    remove_tree,
    tree,
    writing_to,
)

UNTOUCHED_NS = 24 * 3600 * 10**9


@contextmanager
def collecting_paused(root: str | Path) -> Iterator[None]:
    """While open, no collector of the store removes an artifact."""
    place, files = local_root(root), LocalFiles()
    with writing_to(place):
        make_folders(files, place, top=place)
        with files.exclusive(place / GC_LOCK):
            yield


class LocalCollector:
    """The collector of a store in a folder; see `infra.gc.collector.Collector`."""

    def __init__(
        self,
        root: str | Path,
        *,
        files: FileSystem | None = None,
        identity: ProcessIdentity | None = None,
        alive: Callable[[ProcessIdentity], bool | None] = is_alive,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._root = local_root(root)
        self._files: FileSystem = LocalFiles() if files is None else files
        self._identity = identity or this_process()
        self._alive = alive
        self._now_ns = now_ns

    def artifacts(self) -> list[StoredArtifact]:
        """Every artifact in the store that can be removed: not one that nobody can read, nor what lies below a kind
        that has no manifest at all."""
        found: list[StoredArtifact] = []
        for kind in folders(self._files, self._root):
            if is_kind(kind.name):
                with suppress(PermissionError):
                    places = [place for place in folders(self._files, kind) if is_key(place.name)]
                    # A folder without any manifest may be that of another program, such as MLflow's artifacts.
                    for place in places if any(map(self._has_manifest, places)) else ():
                        with suppress(PermissionError):
                            found.append(StoredArtifact(kind.name, place.name, self._size(place)))
        return found

    def _has_manifest(self, place: Path) -> bool:
        with suppress(PermissionError):
            return self._files.status(place / MANIFEST_NAME) is not None
        return False

    def pinned(self) -> set[tuple[str, str]]:
        """Kind and key of what the holders of runs are using. Raises PinsUnreadable."""
        found, place = set[tuple[str, str]](), (runs := self._root / "runs")
        try:
            for place in folders(self._files, runs, links=True):
                found |= self._pins(place)
        except OSError as error:
            raise PinsUnreadable(
                f"what is pinned in {place} cannot be read ({error}): make it readable, or move it away"
            ) from error
        return found

    def orphans(self, *, quickly: bool = False) -> list[Orphan]:
        """What processes that are gone were writing, or removing."""
        runs, staged = self._root / "runs", list[Path]()
        with suppress(OSError):  # what cannot be looked at is left alone
            for folder in [runs, *(run / "leases" for run in folders(self._files, runs))]:
                with suppress(OSError):
                    staged += [path for path in folders(self._files, folder) if path.name.startswith(STAGED)]
        own = [path for name in ("scratch", "trash") for path in folders(self._files, self._root / name)]
        return [
            Orphan(str(path), self._size(path), why)
            for path in [*own, *staged]
            if (why := self._why_orphan(path)) is not None
        ]

    def damaged(self) -> list[Orphan]:
        """The damaged artifacts that were set aside."""
        places = folders(self._files, self._root / "damaged")
        return [Orphan(str(place), self._size(place), "damaged, and set aside") for place in places]

    def collect(
        self, wanted: Iterable[tuple[str, str]], needed: Callable[[], set[tuple[str, str]]]
    ) -> list[StoredArtifact]:
        """Remove the wanted artifacts that are neither pinned nor `needed`, and say which these were.

        `needed` (what the records name) is called while nothing can be pinned, and must read the records then.
        """
        candidates = sorted(set(wanted))
        if not candidates or self._files.status(self._root) is None:
            return []
        with writing_to(self._root):
            with self._files.exclusive(self._root / GC_LOCK):
                # A pin goes once a record names its artifact: so read first the pins, and then the records.
                kept = self.pinned()
                kept |= needed()
                moved = self._move([self._root / kind / key for kind, key in candidates if (kind, key) not in kept])
            sizes = self._empty(moved)
        return [StoredArtifact(place.parent.name, place.name, size) for place, size in sizes.items()]

    def remove(self, orphans: Iterable[Orphan]) -> int:
        """Remove what `orphans` or `damaged` found; the bytes that are free now."""
        with writing_to(self._root):
            moved = self._move([Path(orphan.place) for orphan in orphans])
            for target in moved.values():
                # A collector that died may have moved artifacts here, and not have made that durable.
                self._sync_folders(target)
            return sum(self._empty(moved).values())

    def _move(self, places: Iterable[Path]) -> dict[Path, Path]:
        """Move what is there of these into a new folder in the trash, durable; from where to where."""
        there = [place for place in places if self._files.status(place) is not None]
        if not there:
            return {}
        trash = self._root / "trash" / f"{self._identity.token}-{uuid4().hex}"
        make_folders(self._files, trash, top=self._root)
        moved: dict[Path, Path] = {}
        for place in there:
            # Somebody else may have moved it away.
            with suppress(FileNotFoundError):
                self._files.rename(place, target := trash / f"{len(moved):06d}")
                moved[place] = target
        # Were a move undone after a part is removed, there would be a half artifact.
        self._files.sync_folder(trash)
        for folder in sorted({place.parent for place in moved}):
            self._files.sync_folder(folder)
        if not moved:
            self._files.remove_folder(trash)
        return moved

    def _sync_folders(self, folder: Path) -> None:
        for below in folders(self._files, folder):
            self._sync_folders(below)
        self._files.sync_folder(folder)

    def _empty(self, moved: Mapping[Path, Path]) -> dict[Path, int]:
        """Remove what was moved into the trash; the bytes of each."""
        sizes = {place: self._size(target) for place, target in moved.items()}
        for trash in {target.parent for target in moved.values()}:
            remove_tree(self._files, trash)
        return sizes

    def _why_orphan(self, path: Path) -> str | None:
        writer = identity_of_token(path.name.removeprefix(STAGED).rpartition("-")[0])
        living = None if writer is None else self._alive(writer)
        if writer is not None and living is False:
            return f"left by process {writer.pid} on {writer.host}, which is gone"
        if living is None and self._newest_ns(path) < self._now_ns() - UNTOUCHED_NS:
            return "untouched for a day, by a process of which nothing can be known here"
        return None

    def _newest_ns(self, folder: Path) -> int:
        with suppress(FileNotFoundError):
            found = [self._files.status(folder), *tree(self._files, folder).values()]
            return max(status.modified_ns for status in found if status is not None)
        return self._now_ns()

    def _pins(self, run: Path) -> set[tuple[str, str]]:
        leases, found = LeaseFolders(self._root, run.name, self._identity, self._files), set[tuple[str, str]]()
        for number in leases.numbers().live if self._files.status(leases.folder) is not None else ():
            # A lease that ends while we look takes its pins with it.
            with suppress(FileNotFoundError):
                for name in self._files.names(leases.place(number) / PINS):
                    kind, _, key = name.partition(".")
                    found.add((kind, key))
        return found

    def _size(self, folder: Path) -> int:
        """The bytes in a folder; none if somebody has moved it away."""
        with suppress(FileNotFoundError):
            return sum(status.size for status in tree(self._files, folder).values())
        return 0
