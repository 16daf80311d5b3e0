"""Pages in a local folder: each appears under its name complete and durable, and never replaces another.

A symbolic link is what it points to. What is neither file nor folder, such as a link to nothing, is listed as both, so
that reading it raises: it may have been anything.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from infra.storage.filesystem import FileSystem, LocalFiles, local_root, make_folders, read_whole, writing_to

T = TypeVar("T")
WRITING = ".new-"


class LocalPages:
    """A folder of pages below a store's root."""

    def __init__(self, root: str | Path, *folders: str, files: FileSystem | None = None) -> None:
        self._files: FileSystem = LocalFiles() if files is None else files
        self._root = local_root(root)
        self._folder = self._root.joinpath(*folders)

    def create(self, name: str, content: bytes) -> bool:
        """Write a page, durable when this returns; False if there is one of this name."""
        target, written = self._folder / name, self._folder / f"{WRITING}{uuid4().hex}"
        with writing_to(self._root):
            make_folders(self._files, self._folder, top=self._root)
            if self._files.status(target) is not None:
                # Whoever created it may have died before its name was durable.
                self._files.sync_folder(self._folder)
                return False
            self._files.write(written, [content])
            try:
                self._files.protect(written)
                self._files.sync_file(written)
                # Unlike a rename, a link never replaces what another has created in the meantime.
                self._files.link(written, target)
            except FileExistsError:
                return False
            finally:
                self._files.remove(written)
            self._files.sync_folder(self._folder)
        return True

    def read(self, name: str, parse: Callable[[bytes], T], wrong: type[Exception]) -> T | None:
        """A page's content, parsed, or None; `parse` raises `wrong` where the page is damaged."""
        place = self._folder / name
        status = self._files.status(place)
        if status is not None and status.kind == "special":
            raise OSError(errno.EINVAL, "it is no file", str(place))
        return None if status is None else parse(read_whole(self._files, place))

    def names(self) -> list[str]:
        """The names of all pages, sorted."""
        return self._listed("file")

    def folders(self) -> list[str]:
        """The names of the folders here, sorted."""
        return self._listed("folder")

    def below(self, folder: str) -> LocalPages:
        """Those in a folder here."""
        return LocalPages(self._root, *self._folder.relative_to(self._root).parts, folder, files=self._files)

    def _listed(self, kind: str) -> list[str]:
        if self._files.status(self._folder) is None:
            return []
        found = [(name, self._kind(self._folder / name)) for name in self._files.names(self._folder) if name[0] != "."]
        return [name for name, its in found if its in (kind, "special")]

    def _kind(self, place: Path) -> str | None:
        status = self._files.status(place)
        if status is None or status.kind != "link":
            return None if status is None else status.kind
        try:
            self._files.names(place)
        except NotADirectoryError:
            return "file"
        except OSError:
            return "special"
        return "folder"
